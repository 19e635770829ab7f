"""Detect parameters that were added or unfrozen after the model was wrapped: their gradients have no bucket."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class LateParameters:
    """`LateParameters` detects parameters that require a gradient and were added or unfrozen after its construction.

    Torch's registration hooks report additions. Tensors that replace parameters during a call
    (`torch.func.functional_call`) are not registered, and do not count as added.

    Cost: a check of each frozen parameter per call of `find_newcomers`. The module tree is walked only if a parameter
    was unfrozen, or a parameter or module was registered in this process since the last call.
    """

    def __init__(self, module: nn.Module, trained: Iterable[Tensor], ignored: Collection[str]) -> None:
        self._module = module
        self._trained = {id(parameter) for parameter in trained}  # the reducer keeps these parameters alive
        self._ignored = ignored
        self._frozen = [p for name, p in module.named_parameters() if name not in ignored and not p.requires_grad]
        # Registered anywhere in this process since the last call. Ids are reused, which bounds the dictionary in a
        # process that registers modules for ever and never trains.
        self._arrived: dict[int, weakref.ref[Tensor | nn.Module]] = {}
        _register_hooks()
        _all.add(self)

    def find_newcomers(self) -> list[str]:
        """Return the names of parameters that require a gradient, but were missing or frozen at construction."""
        if not self._arrived and not any(parameter.requires_grad for parameter in self._frozen):
            return []
        # Trained parameters are registered again when the model becomes a part of another, or is compiled.
        watched = {id(parameter) for parameter in (*self._frozen, *self._list_arrived())} - self._trained
        candidates = [
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if id(parameter) in watched and name not in self._ignored
        ]
        newcomers = [name for name, parameter in candidates if parameter.requires_grad]
        if not newcomers:
            self._frozen = [parameter for _, parameter in candidates]
            self._arrived.clear()
        return newcomers

    def _list_arrived(self) -> Iterator[Tensor]:
        for reference in self._arrived.values():
            arrived = reference()
            if isinstance(arrived, nn.Module):
                yield from _parameters_in(arrived)
            elif arrived is not None:
                yield arrived

    def on_registration(self, registered: Tensor | nn.Module | None) -> None:
        """Record a parameter or module that was registered in any module of this process."""
        if registered is not None:
            self._arrived[id(registered)] = weakref.ref(registered)


def _parameters_in(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's parameters without calling its methods, some of which `RemoteModule`, for example, refuses."""
    waiting = [module]
    while waiting:
        one = waiting.pop()
        yield from (parameter for parameter in one._parameters.values() if parameter is not None)
        waiting += (inner for inner in one._modules.values() if inner is not None)


def explain_newcomers(names: Sequence[str], rank: int) -> str:
    """Return the error message, with advice, for parameters that were added or unfrozen."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"DistributedDataParallel on rank {rank}: {names[0]!r}{more} needs a gradient, but was missing or frozen when "
        "the model was wrapped, so its gradient would not be averaged and ranks would drift apart. Add and "
        "unfreeze parameters before the model is wrapped; or wrap it again, model = "
        "DistributedDataParallel(model.module), and build the optimizer after that."
    )


_all: weakref.WeakSet[LateParameters] = weakref.WeakSet()


@functools.cache
def _register_hooks() -> None:
    """Register torch's hooks for parameters and for modules, once per process.

    The hooks are never removed: a wrapper may be garbage-collected while torch iterates over the hooks.
    """
    for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
        register(_on_registration)


def _on_registration(_module: nn.Module, _name: str, registered: Tensor | nn.Module | None) -> None:
    for late_parameters in list(_all):
        late_parameters.on_registration(registered)
