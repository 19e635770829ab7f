"""`DistributedOptimizer`: each parameter is updated by the worker that it lives on, from the gradients of a context."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx import rpc

# Optimizers read `.grad`, which is the parameter's only one: while one of this process has put its gradients there, no
# other may.
_grads_are_ours = threading.Lock()

# The optimizers of this worker, by the number of the reference to them: they live as long as that.
_ours: weakref.WeakValueDictionary[Any, LocalOptimizer] = weakref.WeakValueDictionary()


class DistributedOptimizer:
    """`optimizer_class(parameters, *args, **kwargs)` on each worker that owns some of `params_rref`.

    Any class of torch.optim will do, or any that is made and stepped like those; and PyTorch's functional ones, whose
    `step` takes a list of gradients. Their state lives where the parameters live.

    Raises:
        ValueError: there are no parameters.
        TypeError: `params_rref` holds something else than RRefs.
        Exception: what a worker's constructor raised.
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
        """One step on all workers, from the gradients that the context has gathered. Waits for all of them.

        Parameters without a gradient stay as they are. Steps of several callers come one after the other on each
        worker, in no order that would hold on all.

        Raises:
            RuntimeError: there is no such context.
            Exception: what a worker's optimizer raised; others may have made their step.
        """
        rpc.autograd.get_gradients(context_id)
        here = [one for one in self.remote_optimizers if one.is_owner()]
        others = [one for one in self.remote_optimizers if not one.is_owner()]
        steps = [rpc.rpc_async(one.owner(), _step, (one._id, context_id)) for one in others]
        _wait_all([*(partial(_step, one._id, context_id) for one in here), *(one.wait for one in steps)])


class LocalOptimizer:
    """The part of one worker."""

    def __init__(
        self, optimizer_class: Callable[..., Any], params: list[rpc.RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        self._params: list[Tensor] = [one.local_value() for one in params]
        self.optim = optimizer_class(self._params, *args, **kwargs)
        self._is_functional = not isinstance(self.optim, torch.optim.Optimizer) and not hasattr(self.optim, "zero_grad")

    def step(self, context_id: int) -> None:
        """One step. `.grad` of the parameters is as before at the end."""
        found = rpc.autograd.get_gradients(context_id)
        gradients = [found.get(one) for one in self._params]
        with _grads_are_ours:
            if self._is_functional:
                self.optim.step(gradients)
                return
            before = [one.grad for one in self._params]
            try:
                self._put(gradients)
                self.optim.step()
            finally:
                self._put(before)

    def _put(self, gradients: Sequence[Tensor | None]) -> None:
        for one, gradient in zip(self._params, gradients, strict=True):
            one.grad = gradient


def _make(
    optimizer_class: Callable[..., Any], params: list[rpc.RRef[Any]], *args: Any, **kwargs: Any
) -> rpc.RRef[LocalOptimizer]:
    made = LocalOptimizer(optimizer_class, params, *args, **kwargs)
    rref = rpc.RRef(made)
    _ours[rref._id] = made
    return rref


def _step(rref_id: Any, context_id: int) -> None:
    """Of the optimizer with that number, which whoever calls this holds a reference to."""
    optimizer = _ours.get(rref_id)
    if optimizer is None:
        raise RuntimeError(f"DistributedOptimizer: {rpc.get_worker_info()} has no optimizer {rref_id} (any more).")
    optimizer.step(context_id)


def _wait_all(waits: Sequence[Callable[[], Any]]) -> list[Any]:
    """All results; after all have ended, the first error."""
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
