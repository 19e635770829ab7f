"""Pickle a value with its tensors set apart, and rebuild it; a tensor with two references stays one tensor."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler

from phalanx.optim.rounds import Rounds


class Frozen(NamedTuple):
    """A `Frozen` is the result of `freeze`; `data` refers to each tensor by its index in `tensors`."""

    data: bytes
    tensors: list[Tensor]


def freeze(value: Any, named: Callable[[], Mapping[int, str]] = dict) -> Frozen:
    """Split `value` into pickled bytes and its plain strided tensors, which are not copied.

    `named` returns tensors' names by id; a tensor that has one is stored by name.

    Raises:
        TypeError, AttributeError, PicklingError: a part of the value cannot be pickled, or is trained (`is_trained`).
    """
    file = io.BytesIO()
    pickler = _Pickler(file, named)
    pickler.dump(value)
    return Frozen(file.getvalue(), pickler.tensors)


def thaw(frozen: Frozen, named: Callable[[], Mapping[str, Tensor]] = dict) -> Any:
    """Rebuild the value with copies of its tensors; `named` returns the tensors that were stored by name."""
    return _Unpickler(frozen, named).load()


def is_trained(value: object) -> bool:
    """Return whether `value` is an object that training changes and others refer to, so that no copy can replace it.

    A module without parameters and buffers (a loss function, a transform) is not such an object.
    """
    if isinstance(value, nn.Module):
        return any(True for _ in itertools.chain(value.parameters(), value.buffers()))
    return isinstance(value, (Optimizer, LRScheduler, GradScaler, Rounds, DistributedSampler))


def _tensor(number: int, requires_grad: bool) -> Tensor:
    raise NotImplementedError  # `_Unpickler._tensor` replaces it


def _named(name: str) -> Tensor:
    raise NotImplementedError  # `_Unpickler._named` replaces it


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, named: Callable[[], Mapping[int, str]]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._ask_names = named
        self._names: Mapping[int, str] | None = None
        self.tensors: list[Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            if is_trained(value):
                raise TypeError(
                    f"it contains a {type(value).__name__}, which, inside a plain value, would be replaced by an "
                    "untrained copy when a rank is lost. Pass each model, optimizer, scheduler, scaler and sampler to "
                    "State as its own argument: State(net_a=net_a, net_b=net_b)"
                )
            return NotImplemented
        if self._names is None:
            self._names = self._ask_names()
        if id(value) in self._names:
            return _named, (self._names[id(value)],)
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented  # torch pickles it into `data`
        self.tensors.append(value.detach())
        return _tensor, (len(self.tensors) - 1, value.requires_grad)


class _Unpickler(pickle.Unpickler):
    def __init__(self, frozen: Frozen, named: Callable[[], Mapping[str, Tensor]]) -> None:
        super().__init__(io.BytesIO(frozen.data))
        self._tensors: Sequence[Tensor] = frozen.tensors
        self._ask_tensors = named

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in ("_tensor", "_named"):
            return getattr(self, name)
        return super().find_class(module, name)

    def _tensor(self, number: int, requires_grad: bool) -> Tensor:
        return self._tensors[number].clone().requires_grad_(requires_grad)

    def _named(self, name: str) -> Tensor:
        return self._ask_tensors()[name]
