"""Keep what modules are switched to at a commit: which layers train, and which wrappers are about to send buffers."""

from __future__ import annotations

from typing import Any

from torch import nn

from phalanx.elastic.objects import Objects
from phalanx.elastic.rebind import averaging_modules


class Switches:
    """`Switches` keeps those of all modules in `objects`, which a loss may find in a validation, or in an accumulation.

    Cost: a look at each layer in each commit.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._wrappers: list[Any] = list(averaging_modules(objects.modules))
        self._layers: list[nn.Module] = []
        self.kept: tuple[list[bool], list[bool]] = [], []
        """Whether each layer trains, and whether each wrapper's next forward begins with rank 0's buffers."""

    def keep_all(self) -> None:
        """Keep them as they are at the end of an epoch, after which the loop sets them for the next one."""
        self._layers = list(self._objects.layers())
        self.kept = [layer.training for layer in self._layers], self._broadcasts()

    def keep(self) -> None:
        """Keep them as they are at the commit of a step.

        A loop may commit in evaluation, and train again behind the commit, which is not done again after a loss. So the
        layers' are those of the latest commit at which all models that have an optimizer trained.
        """
        modes = self.kept[0]
        if all(module.training for module in self._objects.trained):
            modes = [layer.training for layer in self._layers]
        self.kept = modes, self._broadcasts()

    def _broadcasts(self) -> list[bool]:
        return [wrapper.require_forward_param_sync for wrapper in self._wrappers]

    def give_back(self) -> None:
        """Set all modules as they were kept."""
        modes, broadcasts = self.kept
        self._layers = list(self._objects.layers())
        for layer, trains in zip(self._layers, modes, strict=False):
            layer.training = trains
        for wrapper, is_due in zip(self._wrappers, broadcasts, strict=True):
            wrapper.require_forward_param_sync = is_due
