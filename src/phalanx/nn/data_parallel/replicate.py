"""Make replicas of a module: modules of their own that share its parameters' memory.

module      w  b  running_mean         parameters and buffers, and what the optimizer sees
              |
replica 0   w0 b0 running_mean         w0: a leaf of autograd with the memory of w, whose gradient is replica 0's part
replica 1   w1 b1 a copy               its buffers are copies, and are dropped after forward
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def replicate(module: nn.Module, num_replicas: int) -> list[nn.Module]:
    """Return `num_replicas` modules with the hooks and attributes of `module`, each with submodules of its own.

    Parameters share the memory of the module's; where gradients are wanted each replica has leaves of its own in it.
    Replica 0 has the module's buffers, the others have copies. What is tied stays tied.

    Cost: a Python object per submodule and trained parameter; a copy of the buffers for each replica but the first.

    Raises:
        TypeError: a submodule is what torch.compile returns.
    """
    for name, child in module.named_modules():
        if "_orig_mod" in child._modules:
            raise TypeError(
                f"DataParallel can't replicate {name or 'the module'!r}, which torch.compile has returned: it would "
                "call the original in place of its replica. Pass the module as it was before it was compiled"
            )
    return [_replica(module, first=number == 0) for number in range(num_replicas)]


def trained_tensors(module: nn.Module) -> list[Tensor]:
    """Return what backward reaches, each tensor once: the order is the same for a module and its replicas."""
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.requires_grad]


def _replica(module: nn.Module, *, first: bool) -> nn.Module:
    parameter_of = _once(_alias)
    buffer_of = _once(_own_buffer if first else _copy_buffer)
    replicas: dict[nn.Module, nn.Module] = {
        original: original._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for original in module.modules()
    }
    for original, replica in replicas.items():
        replica._modules = {
            name: None if child is None else replicas[child] for name, child in original._modules.items()
        }
        replica._buffers = {name: None if b is None else buffer_of(b) for name, b in original._buffers.items()}
        for name, parameter in original._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            elif type(replica).__setattr__ is nn.Module.__setattr__:
                replica._parameters[name] = parameter_of(parameter)  # type: ignore[assignment]
            else:  # recurrent layers keep a list of their weights, and update it so
                setattr(replica, name, parameter_of(parameter))
    return replicas[module]


def _once(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    made: dict[int, Tensor] = {}

    def get(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = make(tensor)
        return made[id(tensor)]

    return get


def _needs_leaf(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _alias(parameter: Tensor) -> Tensor:
    if _needs_leaf(parameter) or not isinstance(parameter, nn.Parameter):  # functional_call puts plain tensors there
        return nn.Parameter(parameter.detach(), requires_grad=_needs_leaf(parameter))
    return parameter


def _own_buffer(buffer: Tensor) -> Tensor:
    return buffer.detach().requires_grad_() if _needs_leaf(buffer) else buffer


def _copy_buffer(buffer: Tensor) -> Tensor:
    return buffer.detach().clone().requires_grad_(_needs_leaf(buffer))
