"""Read a program's tensors inside its own forward and backward without any visible effect.

can_observe     no functorch level, no trace, no fake tensors: operators compute real values
outside_modes   no dispatch mode, function mode or subclass sees our operators
elements_of     only plain, strided, dense tensors with memory, as a view
invisible       a decorator that runs a watch's methods this way; an error disables the watch, and is not raised
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from phalanx._base.log import get_logger
from phalanx._base.torch_names import find
from phalanx._comm.transport.tensors import is_dense, is_zero_tensor

_logger = get_logger("phalanx.ddp")

_LOSES = "DistributedDataParallel does not check the first steps for mistakes"
_functorch_level: Any = find("torch._C._functorch.maybe_current_level", loses=_LOSES, instead=lambda: 0)
_tracing_state: Any = find("torch._C._get_tracing_state", loses=_LOSES, instead=lambda: 0)
_dispatch_mode: Any = find("torch._C._get_dispatch_mode", loses=_LOSES, instead=lambda key: key)
_ModeKey: Any = find("torch._C._TorchDispatchModeKey", loses=_LOSES)
_DisableTorchDispatch: Any = find("torch._C._DisableTorchDispatch", loses=_LOSES)
_DisableTorchFunction: Any = find("torch._C.DisableTorchFunction", loses=_LOSES)

_PLAIN = (Tensor, nn.Parameter)  # no subclasses, which may override operators


class _Watch(Protocol):
    disabled: bool


_W = TypeVar("_W", bound=_Watch)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def can_observe() -> bool:
    """Return whether an operator called now computes real values: it is not transformed, traced or faked."""
    return not (
        _functorch_level() is not None
        or _tracing_state() is not None
        or torch.compiler.is_compiling()
        or any(_dispatch_mode(key) is not None for key in (_ModeKey.FAKE, _ModeKey.PROXY, _ModeKey.FUNCTIONAL))
    )


@contextmanager
def outside_modes() -> Iterator[None]:
    """Hide the operators inside the `with` block from modes, subclasses and autograd."""
    with _DisableTorchDispatch(), _DisableTorchFunction(), torch.no_grad():
        yield


def invisible(method: Callable[Concatenate[_W, _P], _R]) -> Callable[Concatenate[_W, _P], _R | None]:
    """Run a method of a watch outside of modes; do nothing if the watch is disabled, or `can_observe` is False.

    An error in the method disables the watch, and is not raised.
    """

    def observe(self: _W, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            if self.disabled or not can_observe():
                return None
            with outside_modes():
                return method(self, *args, **kwargs)
        except Exception:
            self.disabled = True
            _logger.debug("DistributedDataParallel stops watching for mistakes", exc_info=True)
            return None

    observe.__doc__ = method.__doc__
    return observe


def elements_of(tensor: Tensor) -> Tensor | None:
    """Return a tensor's elements in memory order, as a one-dimensional view, or None if they are not one block.

    Only plain, strided, dense tensors with memory have such a block. An expanded dimension appears once.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    if tensor.is_nested or tensor.is_quantized or tensor.is_mkldnn:
        return None
    if tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor):
        return None
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    last = tensor.storage_offset() + tensor.numel()
    if not is_dense(tensor) or last * tensor.element_size() > tensor.untyped_storage().nbytes():
        return None
    return tensor.as_strided((tensor.numel(),), (1,))


def all_elements_of(tensors: list[Tensor]) -> list[Tensor] | None:
    """Return the elements of each tensor, or None if there are no tensors or some tensor cannot be read."""
    found = [elements for tensor in tensors if (elements := elements_of(tensor)) is not None]
    return found if found and len(found) == len(tensors) else None
