"""Look up the strategy under which the current code runs, and the replica's context, as in tf.distribute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.strategies.strategy import Strategy

T = TypeVar("T")

_current: ContextVar[Strategy | None] = ContextVar("phalanx.strategies.current", default=None)


@contextlib.contextmanager
def entered(strategy: Strategy) -> Iterator[None]:
    """Make `strategy` the current strategy inside the block.

    Raises:
        RuntimeError: another strategy is current.
    """
    other = _current.get()
    if other is not None and other is not strategy:
        raise RuntimeError(
            f"{strategy!r} is entered in the scope of another strategy, {other!r}: leave that scope first"
        )
    token = _current.set(strategy)
    try:
        yield
    finally:
        _current.reset(token)


def has_strategy() -> bool:
    """Return whether the caller runs in a strategy's `scope` or `run`."""
    return _current.get() is not None


def current_strategy() -> Strategy | None:
    """Return the strategy in whose `scope` or `run` the caller runs; None if there is none."""
    return _current.get()


class ReplicaContext:
    """A `ReplicaContext` describes the replica in which `Strategy.run` calls a function."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.num_replicas_in_sync = strategy.num_replicas_in_sync
        self.replica_id_in_sync_group = strategy.replica_id_in_sync_group

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """Return the result of `Strategy.reduce` for `value`. All replicas call it."""
        return self.strategy.reduce(reduce_op, value)

    def all_gather(self, value: Tensor, axis: int) -> Tensor:
        """Return the result of `Strategy.gather` for `value`. All replicas call it."""
        return self.strategy.gather(value, axis)

    def merge_call(
        self, merge_fn: Callable[..., T], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Call `merge_fn(strategy, *args, **kwargs)` on each replica, with the replica's own values.

        Unlike in tf.distribute, `merge_fn` runs in every replica, since each replica is a process. To combine values,
        call `strategy.reduce` in `merge_fn`.
        """
        return merge_fn(self.strategy, *args, **(kwargs or {}))
