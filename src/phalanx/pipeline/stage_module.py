"""A rank's stages as a module: what it has of a model, under the names of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from phalanx.pipeline.own_modules import OwnModules
from phalanx.pipeline.whole_state import gather_state, require_same_names

if TYPE_CHECKING:
    from typing_extensions import Self


class StageModule(nn.Module):
    """Looks like the whole model, whose parameters, buffers and modules of other ranks are left out."""

    _own: OwnModules

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """`module`: the whole model; `take_own` says what of it is this rank's."""
        super().__init__()
        self.training = module.training
        self._group = group
        whole: Any = module.state_dict()
        self._state_names, self._metadata = list(whole), whole._metadata
        self._model_name = type(module).__name__
        first = {id(p): name for name, p in module.named_parameters()}
        self._first_names = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        self._without_values: list[str] = []

    def _hold(self, own: OwnModules) -> None:
        object.__setattr__(self, "_own", own)  # not as a child: names would begin with it

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank's stages, with the names of the whole model."""
        found = self._own.named_parameters("", recurse, remove_duplicate)
        named = {self._first_names[name] if remove_duplicate else name: parameter for name, parameter in found}
        for name in self._first_names:  # in the order of the whole model
            if name in named:
                yield prefix + "." * bool(prefix) + name, named[name]

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Of this rank's stages, with the names of the whole model.

        Shape: as in the whole model.

        Raises:
            Nothing of its own.
        """
        yield from self._own.named_buffers(prefix, recurse, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Of this rank's stages, with the names of the whole model."""
        yield from self._own.named_children()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Of this rank's stages, with the names of the whole model."""
        yield from self._own.named_modules(memo, prefix, remove_duplicate)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        cast("Any", self._own)._apply(fn, recurse)
        return self

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False, rank0_only: bool = False
    ) -> Any:
        """The state of the whole model, as it is without a pipeline. Collective: every rank of the group calls it.

        With `rank0_only` the whole is on the first rank alone, and each other one has what is its own: for a model
        that is too large for one process.
        """
        own = self._own.state_dict(keep_vars=keep_vars)
        whole = gather_state(own, self._state_names, self._group, rank0_only=rank0_only)
        if destination is None:
            destination = whole
            destination._metadata = self._metadata
        else:
            destination.update({prefix + name: value for name, value in whole.items()})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take this rank's part of the whole model's state, however the model was cut when that was saved.

        Raises:
            RuntimeError: with `strict`, names are missing or unknown; or a shape is another.
            ValueError: `assign`, which would replace the tensors that stages have.
        """
        if assign:
            raise ValueError("Pipeline.load_state_dict copies into the stages' tensors; assign=True is not possible")
        missing, unexpected = require_same_names(state_dict, self._state_names)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for Pipeline of {self._model_name}:"
                + (f"\n\tMissing key(s): {', '.join(map(repr, missing))}." if missing else "")
                + (f"\n\tUnexpected key(s): {', '.join(map(repr, unexpected))}." if unexpected else "")
            )
        mine = set(self._own.state_dict())
        self._own.load_state_dict({name: v for name, v in state_dict.items() if name in mine}, strict=False)
        self._without_values = [name for name in self._without_values if name not in state_dict]
        return _IncompatibleKeys(missing, unexpected)
