"""`RemoteModule` is a module on another worker, with the interface of `torch.distributed.nn.RemoteModule`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.futures import Future

from phalanx.rpc.invoke import remote, rpc_async, rpc_sync
from phalanx.rpc.rref import RRef
from phalanx.rpc.start import get_worker_info

T = TypeVar("T", bound=nn.Module)


class RemoteModule(nn.Module):
    """`RemoteModule` creates and keeps `module_cls(*args, **kwargs)` on another worker; `forward` runs there.

    In a `phalanx.rpc.autograd.context`, the backward pass includes the remote module. A `RemoteModule` can be sent to
    other workers. It can be a submodule of a local module, also under DDP: a local optimizer then updates the local
    parameters, and `phalanx.optim.DistributedOptimizer(..., remote_parameters())` the remote ones.

    Arguments:
        remote_device: "worker", "worker/cuda:0", "rank:1" or "rank:1/cpu", without a device on the CPU; or "cuda:0",
            a device of this worker.
        module_cls: a class, or a function that returns the module.

    Cost: one RPC per forward, with copies of its arguments and results. For a module on a GPU, argument tensors
    are also copied to the GPU, and result tensors to the host.

    Raises:
        ValueError: `remote_device` is invalid.
        Exception: the module's constructor raised it; the first use of the module raises it here.
    """

    module_rref: RRef[nn.Module]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.on, self.device = _parse(remote_device)
        made = (module_cls, tuple(args or ()), dict(kwargs or {}), self.device)
        self.module_rref = remote(self.on, _make, made)

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        """Return a RemoteModule for an existing module, from a reference to it."""
        made = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(made)
        made.on, made.device = _parse(remote_device)
        made.module_rref = module_rref
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its worker, and wait for the result."""
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the module on its worker, and return a Future of the result."""
        return rpc_async(self.module_rref.owner(), _forward, (self.module_rref, self.device, args, kwargs))

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the module's parameters, for a `phalanx.optim.DistributedOptimizer`."""
        found: list[RRef[nn.Parameter]] = rpc_sync(
            self.module_rref.owner(), _refer_to_parameters, (self.module_rref, recurse)
        )
        return found

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return a reference to the module."""
        return self.module_rref

    def train(self: T, mode: bool = True) -> T:
        """Set the training mode of the module on its worker, and of this object."""
        rref = self.__dict__.get("module_rref")
        if rref is not None:
            rpc_sync(rref.owner(), _set_mode, (rref, mode))
        return super().train(mode)

    def extra_repr(self) -> str:
        """Return the worker and the device of the module."""
        return f"on={self.on!r}, device={self.device!r}"

    def __reduce__(self) -> Any:
        return _receive, (self.on, self.device, self.module_rref)  # an RRef can be pickled only in an RPC

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Raise, because the parameters are on the other worker."""
        raise ValueError("Method `parameters` not supported for RemoteModule. Please use `remote_parameters` instead.")


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"Method `{name}` not supported for RemoteModule: the module is on another worker. "
            "get_module_rref().rpc_sync() calls it there."
        )

    method.__name__ = name
    return method


# The methods that PyTorch's class refuses, except those that a parent module needs to find its own parameters.
for _name in (
    "add_module", "apply", "bfloat16", "buffers", "cpu", "cuda", "double", "float", "half", "ipu", "load_state_dict",
    "named_buffers", "named_parameters", "register_backward_hook", "register_buffer", "register_forward_hook",
    "register_forward_pre_hook", "register_parameter", "requires_grad_", "share_memory", "state_dict", "to", "type",
    "xpu", "zero_grad",
):  # fmt: skip
    setattr(RemoteModule, _name, _refuse(_name))


def _parse(remote_device: str) -> tuple[str | int, str]:
    """Return the worker, by name or rank, and the device on it."""
    worker, slash, device = remote_device.partition("/")
    kind, colon, number = worker.partition(":")
    try:
        if not slash and _is_device(worker):
            return get_worker_info().id, str(torch.device(worker))
        place = str(torch.device(device if slash else "cpu"))
    except RuntimeError:
        place = ""
    if not place or not worker or (colon and not (kind == "rank" and number.isdecimal())):
        raise ValueError(
            f"Could not parse remote_device: {remote_device}. The valid format is '<workername>/<device>' or "
            "'rank:<rank>/<device>' or '<device>'"
        )
    return (int(number) if colon else worker), place


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _receive(on: str | int, device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
    return RemoteModule.init_from_module_rref(
        f"rank:{on}/{device}" if isinstance(on, int) else f"{on}/{device}", module_rref
    )


# -- on the module's worker --------------------------------------------------------------------------------------------


def _make(module_cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance "
            f"of {type(module)}."
        )
    return module.to(device)


def _forward(module_rref: RRef[nn.Module], device: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    module = module_rref.local_value()
    if torch.device(device).type == "cpu":
        return module(*args, **kwargs)
    args = [_move(each, device) for each in args]
    result = module(*args, **{name: _move(value, device) for name, value in kwargs.items()})
    if isinstance(result, (list, tuple)):
        return tuple(_move(each, "cpu") for each in result)
    return _move(result, "cpu")


def _move(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _refer_to_parameters(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _set_mode(module_rref: RRef[nn.Module], mode: bool) -> None:
    module_rref.local_value().train(mode)
