"""Tensors that a loop changes before its update, kept, so that a step that is done again changes them once.

momentum encoder changes │ forward │ backward, where a rank is lost        on survivors it has changed already
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ForwardChanges:
    """Watches `tensors`, which no optimizer updates; which of them are changed by forwards, the steps show.

    Cost: a look at the number of changes of each, twice a step; and a copy, before each step, of those that forwards
    change. In the first step, of all.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._changing: set[int] | None = None  # by place in `tensors`; None before it is known
        self._copies: dict[int, Tensor] = {}
        self._copied: dict[int, int] = {}  # the version of each that was copied
        self._versions: list[int] | None = None  # as the step began; None outside of one

    @torch.no_grad()
    def begin_step(self) -> None:
        """The first forward of a step is about to begin; once in each."""
        if self._versions is not None or not self._tensors:
            return
        self._versions = [tensor._version for tensor in self._tensors]
        for number in range(len(self._tensors)) if self._changing is None else self._changing:
            tensor, version = self._tensors[number], self._versions[number]
            if number not in self._copies:
                self._copies[number] = tensor.detach().clone()
            elif self._copied[number] != version:
                self._copies[number].copy_(tensor)
            self._copied[number] = version

    def learn(self) -> None:
        """The update is about to begin: what has changed by now was changed by a forward."""
        if self._versions is None:
            return
        self._changing = self._changed() | (self._changing or set())
        for number in self._copies.keys() - self._changing:
            del self._copies[number], self._copied[number]

    def end_step(self) -> None:
        """It is committed, or taken back."""
        self._versions = None

    @torch.no_grad()
    def give_back(self) -> list[int]:
        """All are as they were when the step began, but those that were never seen to change: their numbers."""
        if self._versions is None:
            return []
        changed = self._changed()
        for number in changed & self._copies.keys():
            self._tensors[number].copy_(self._copies[number])
            self._copied[number] = self._tensors[number]._version
        self._versions = None
        return sorted(changed - self._copies.keys())

    def _changed(self) -> set[int]:
        assert self._versions is not None
        return {i for i, (t, v) in enumerate(zip(self._tensors, self._versions, strict=True)) if t._version != v}
