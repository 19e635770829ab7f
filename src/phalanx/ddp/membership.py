"""Parameters that came to a model after it was wrapped: they have no place in a bucket, and nobody averages them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Membership:
    """Notices parameters of `module` that need a gradient and are not among `trained`.

    Cost: a look at each frozen parameter per call of `find_newcomers`. The tree of modules is walked only after a
    parameter or module was registered somewhere in this process, which torch's hooks for that tell.
    """

    def __init__(self, module: nn.Module, trained: Sequence[Tensor], ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._trained = {id(parameter) for parameter in trained}  # they live as long as the buckets
        self._frozen: list[Tensor] = []
        self._tree_changed = True
        told = _when_registered(weakref.ref(self))
        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            weakref.finalize(self, register(told).remove)

    def find_newcomers(self) -> list[str]:
        """Names of the parameters that need a gradient now and have no place in a bucket."""
        if not self._tree_changed and not any(parameter.requires_grad for parameter in self._frozen):
            return []
        named = [(name, p) for name, p in self._module.named_parameters() if name not in self._ignored]
        newcomers = [name for name, p in named if p.requires_grad and id(p) not in self._trained]
        if not newcomers:
            self._frozen = [parameter for _, parameter in named if not parameter.requires_grad]
            self._tree_changed = False
        return newcomers

    def on_registration(self) -> None:
        """Some module of this process was given a parameter or a module."""
        self._tree_changed = True


def explain_newcomers(names: Sequence[str], rank: int) -> str:
    """What to do about parameters that were added or unfrozen."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"DistributedDataParallel on rank {rank}: {names[0]!r}{more} needs a gradient, but was not there or was frozen "
        "when the model was wrapped, so its gradient would not be averaged and ranks would drift apart. Add and "
        "unfreeze parameters before the model is wrapped; or wrap it anew, model = "
        "DistributedDataParallel(model.module), and build the optimizer after that."
    )


def _when_registered(membership: weakref.ref[Membership]) -> Callable[[nn.Module, str, object], None]:
    def hook(_module: nn.Module, _name: str, _registered: object) -> None:
        alive = membership()
        if alive is not None:
            alive.on_registration()

    return hook
