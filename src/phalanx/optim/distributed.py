"""`DistributedOptimizer` updates parameters on the RPC workers that own them, from a distributed autograd context."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx import rpc
from phalanx._base.torch_names import find
from phalanx.rpc import current
from phalanx.rpc.agent.agent import Agent
from phalanx.rpc.autograd.leaf_hooks import grads_are_ours
from phalanx.rpc.autograd.serve import worker
from phalanx.rpc.wire import Frame, Order

_SLOWER = "small steps of a DistributedOptimizer are slower"
# If torch lacks one of these names, we assume that there is a hook, and call the whole step.
_GLOBAL_HOOKS = (
    find("torch.optim.optimizer._global_optimizer_pre_hooks", loses=_SLOWER, instead=True),
    find("torch.optim.optimizer._global_optimizer_post_hooks", loses=_SLOWER, instead=True),
)
_profiler_enabled: Any = find("torch.autograd._profiler_enabled", loses=_SLOWER, instead=lambda: True)
_set_grad: Any = find("torch._C._set_grad_enabled", loses=_SLOWER, instead=torch.set_grad_enabled)

_ORDER = struct.Struct("<B3Q")  # the request of a step: the ids of the optimizer's RRef and of the context

# This worker's optimizers, by the id of the RRef to each; an optimizer lives as long as its RRef.
_ours: weakref.WeakValueDictionary[Any, LocalOptimizer] = weakref.WeakValueDictionary()


class DistributedOptimizer:
    """Create `optimizer_class(parameters, *args, **kwargs)` on each worker that owns some of `params_rref`.

    `optimizer_class` may be any class of torch.optim, any class that is constructed and stepped like those, or one of
    PyTorch's functional optimizers, whose `step` takes a list of gradients. State is on the parameters' owners.

    Raises:
        ValueError: there are no parameters.
        TypeError: `params_rref` holds something other than RRefs.
        Exception: the error that the constructor raised on a worker.
    """

    def __init__(
        self, optimizer_class: Callable[..., Any], params_rref: Sequence[rpc.RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        by_owner: dict[rpc.WorkerInfo, list[rpc.RRef[Any]]] = {}
        for number, one in enumerate(params_rref):
            if not isinstance(one, rpc.RRef):
                raise TypeError(f"DistributedOptimizer: params_rref[{number}] is a {type(one).__name__}, not an RRef")
            by_owner.setdefault(one.owner(), []).append(one)
        if not by_owner:
            raise ValueError("DistributedOptimizer: got an empty parameter list")
        made = [
            rpc.rpc_async(owner, _make, (optimizer_class, params, *args), kwargs) for owner, params in by_owner.items()
        ]
        self.remote_optimizers: list[rpc.RRef[LocalOptimizer]] = _wait_all([one.wait for one in made])

    def step(self, context_id: int) -> None:
        """Take one step on all workers, with the context's accumulated gradients, and wait for all of them.

        Parameters without a gradient do not change. Steps of several callers run one after another on each worker, in
        an order that may differ between workers.

        Raises:
            RuntimeError: there is no such context.
            Exception: the error of a worker's optimizer; other workers may have completed their step.
        """
        worker().contexts.find(context_id)
        agent = current.agent()
        waits: list[Callable[[], Any]] = []
        for one in self.remote_optimizers:
            if one.is_owner():
                waits.insert(0, partial(_step, one._id, context_id))  # while the other workers step
            else:
                order = _ORDER.pack(Order.STEP, *one._id, context_id)
                waits.append(agent.order(one._owner, "DistributedOptimizer.step", order).wait)
        _wait_all(waits)


class LocalOptimizer:
    """A `LocalOptimizer` is the part of a `DistributedOptimizer` on one worker."""

    def __init__(
        self, optimizer_class: Callable[..., Any], params: list[rpc.RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        self._params: list[Tensor] = [one.local_value() for one in params]
        self.optim = optimizer_class(self._params, *args, **kwargs)
        self._is_functional = not isinstance(self.optim, torch.optim.Optimizer) and not hasattr(self.optim, "zero_grad")

    def step(self, context_id: int) -> None:
        """Take one step with the context's gradients, then restore the parameters' `.grad`."""
        gradients: list[Tensor | None] = [None] * len(self._params)
        found = worker().contexts.find_open(context_id)
        if found is not None:
            with found.lock:
                gradients = [found.gradients.get(one) for one in self._params]
        with grads_are_ours:
            if self._is_functional:
                self.optim.step(gradients)
                return
            before = [one.grad for one in self._params]
            try:
                self._put(gradients)
                _step_of(self.optim)()
            finally:
                self._put(before)

    def _put(self, gradients: Sequence[Tensor | None]) -> None:
        for one, gradient in zip(self._params, gradients, strict=True):
            one.grad = gradient


def _use_grad() -> Any:
    """Return the code object of torch's innermost wrapper around its optimizers' `step`, below profiler and hooks."""
    wrap: Any = find("torch.optim.optimizer._use_grad_for_differentiable", loses=_SLOWER, instead=None)
    return None if wrap is None else wrap(_use_grad).__code__


_USE_GRAD = _use_grad()


def _step_of(optim: Any) -> Callable[[], Any]:
    """Return the optimizer's step; to save time, skip the profiler's event and the hooks if they are unused."""
    if (
        isinstance(optim, torch.optim.Optimizer)
        and type(optim).__module__.startswith("torch.optim.")
        and not optim.__dict__.get("step")  # a scheduler wraps `step` to count the calls
        and not optim._optimizer_step_pre_hooks
        and not optim._optimizer_step_post_hooks
        and not _GLOBAL_HOOKS[0]
        and not _GLOBAL_HOOKS[1]
        and not _profiler_enabled()
    ):
        without_hooks: Any = getattr(type(optim).step, "__wrapped__", None)
        if getattr(without_hooks, "__code__", None) is _USE_GRAD and not optim.defaults["differentiable"]:
            return partial(_step_without_grad, without_hooks.__wrapped__, optim)
    step: Callable[[], Any] = optim.step
    return step


def _step_without_grad(step: Callable[[Any], Any], optim: Any) -> None:
    before = torch.is_grad_enabled()
    _set_grad(False)
    try:
        step(optim)
    finally:
        _set_grad(before)


def _make(
    optimizer_class: Callable[..., Any], params: list[rpc.RRef[Any]], *args: Any, **kwargs: Any
) -> rpc.RRef[LocalOptimizer]:
    made = LocalOptimizer(optimizer_class, params, *args, **kwargs)
    agent = current.agent()
    agent.orders[Order.STEP] = partial(_handle_step, agent)
    rref = rpc.RRef(made)
    _ours[rref._id] = made
    return rref


def _step(rref_id: Any, context_id: int) -> None:
    """Step the optimizer `rref_id` of this worker; the caller holds a reference to it."""
    optimizer = _ours.get(rref_id)
    if optimizer is None:
        raise RuntimeError(
            f"DistributedOptimizer: {rpc.get_worker_info()} has no optimizer {rref_id}, or no longer has it."
        )
    optimizer.step(context_id)


def _handle_step(agent: Agent, connection: Any, frame: Frame) -> None:
    _, uid, number, context_id = _ORDER.unpack(frame.data)
    problem: BaseException | None = None
    try:
        _step((uid, number), context_id)
    except BaseException as error:
        problem = error
    agent.answer_order(connection, frame.call, b"", (), problem)


def _wait_all(waits: Sequence[Callable[[], Any]]) -> list[Any]:
    """Wait for all results and return them; raise the first error after all have ended."""
    results: list[Any] = []
    errors: list[BaseException] = []
    for wait in waits:
        try:
            results.append(wait())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
