"""Rebind DDP wrappers and other modules from the old group to the new one, keeping the same Python objects."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Set
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from phalanx._comm.backend.torch_integration.groups import is_listed
from phalanx.ddp import DistributedDataParallel

_WRAPPERS = (DistributedDataParallel, TorchDistributedDataParallel)


def rebind_module(module: nn.Module, old: Any, new: Any) -> None:
    """Make `module` and its submodules use `new`, and clear its gradients. All ranks of `new` call this."""
    for layer in list(module.modules()):
        if isinstance(layer, DistributedDataParallel):
            layer.regroup(_find_group(layer, new))
        elif isinstance(layer, TorchDistributedDataParallel):
            _rebind_torch(layer, layer.process_group, _find_group(layer, new))
        elif getattr(layer, "process_group", None) is old:
            layer.process_group = new
    for parameter in module.parameters():
        parameter.grad = None


def _find_group(layer: Any, new: Any) -> Any:
    """Return the wrapper's own group if torch still lists it; otherwise `new`, as it was an earlier default group."""
    own = layer.process_group
    return own if is_listed(own) else new


def _rebind_torch(ddp: Any, old: Any, new: Any) -> None:
    """Give PyTorch's wrapper a new reducer, as unpickling does, because a reducer is bound to one group."""
    ddp.process_group = new
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    for parameter in ddp.module.parameters():
        parameter.grad = None
    parameters, expect_sparse_gradient = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp.reducer = ddp.logger = None  # removes the old reducer's hooks, before the new reducer adds its own
    ddp._ddp_init_helper(parameters, expect_sparse_gradient, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    for hook, state in hooks:
        ddp.register_comm_hook(new if state is old else state, hook)
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()


def averaging_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the DistributedDataParallel wrappers in `modules`, ours and PyTorch's."""
    return [layer for module in modules for layer in module.modules() if isinstance(layer, _WRAPPERS)]


def find_wrappers_outside(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the wrappers that average gradients of parameters of `modules`, but are in none of `modules`.

    Cost: a visit to each object that Python's garbage collector tracks, unless wrappers in `modules` have all
    parameters.
    """
    modules = list(modules)
    averaged = {id(p) for wrapper in averaging_modules(modules) for p in wrapper.parameters()}
    parameters = {id(p) for module in modules for p in module.parameters()} - averaged
    if not parameters or not _find_wrappers(parameters):
        return []
    gc.collect()  # an unreachable wrapper may still be in memory
    return _find_wrappers(parameters)


def _find_wrappers(parameters: Set[int]) -> list[nn.Module]:
    # no isinstance, which may run an object's own code
    wrappers = [one for one in gc.get_objects() if any(kind in _WRAPPERS for kind in type(one).__mro__)]
    return [one for one in wrappers if not parameters.isdisjoint(map(id, one.parameters()))]
