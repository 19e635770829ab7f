"""Which strategy the code at hand runs under, by the functions of tf.distribute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.strategies.strategy import Strategy

_current: ContextVar[Strategy | None] = ContextVar("phalanx.strategies.current", default=None)


@contextlib.contextmanager
def entered(strategy: Strategy) -> Iterator[None]:
    """`strategy` is the current one."""
    token = _current.set(strategy)
    try:
        yield
    finally:
        _current.reset(token)


def has_strategy() -> bool:
    """Whether this runs in a strategy's `scope` or `run`."""
    return _current.get() is not None


def get_strategy() -> Strategy:
    """The strategy in whose `scope` or `run` this is.

    Raises:
        RuntimeError: it is in none.
    """
    strategy = _current.get()
    if strategy is None:
        raise RuntimeError("get_strategy: no strategy is in scope here; `with strategy.scope():` makes one current")
    return strategy


class ReplicaContext:
    """What a function that `Strategy.run` calls may ask of its replica."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.num_replicas_in_sync = strategy.num_replicas_in_sync
        self.replica_id_in_sync_group = strategy.replica_id_in_sync_group

    def all_reduce(self, reduce_op: Any, value: Any) -> Any:
        """`Strategy.reduce` over the replicas. Collective."""
        return self.strategy.reduce(reduce_op, value)


def get_replica_context() -> ReplicaContext:
    """This replica, by the name of tf.distribute.

    Raises:
        RuntimeError: no strategy is in scope.
    """
    return ReplicaContext(get_strategy())
