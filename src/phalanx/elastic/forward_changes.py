"""Keep tensors that a loop changes before its update, so that a repeated step changes them once.

momentum encoder changes │ forward │ backward, where a rank is lost        on survivors it has changed already
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ForwardChanges:
    """`ForwardChanges` watches `tensors`, which no optimizer updates; the steps show which of them forwards change.

    A change through `.data` changes no version, so the first step compares values: later ones alone are not found.

    Cost: a look at the number of changes of each tensor, twice a step; and a copy, before each step, of those that
    forwards change. In the first step all are copied, and compared with the copies.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._changing: set[int] | None = None  # positions in `tensors`; None before they are known
        self._copies: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}  # by position: the memory that was copied
        self._versions: list[int] | None = None  # the versions as the step began; None outside a step

    def forget(self) -> None:
        """Begin as in a first step: it is not known what forwards change."""
        self._changing, self._versions = None, None
        self._copies, self._places = {}, {}

    @torch.no_grad()
    def begin_step(self) -> None:
        """Copy what forwards may change, because the first forward of a step is about to begin."""
        if self._versions is not None or not self._tensors:
            return
        self._versions = [tensor._version for tensor in self._tensors]
        for number in range(len(self._tensors)) if self._changing is None else self._changing:
            tensor, copy = self._tensors[number], self._copies.get(number)
            if copy is None or not _is_alike(copy, tensor):
                self._copies[number] = tensor.detach().clone()
            else:
                copy.copy_(tensor)
            self._places[number] = _place(tensor)

    @torch.no_grad()
    def learn(self) -> None:
        """Find out what forwards change: everything that has changed when the update is about to begin."""
        if self._versions is None:
            return
        self._changing = self._changed() | (self._changing or set())
        for number in self._copies.keys() - self._changing:
            del self._copies[number], self._places[number]

    def end_step(self) -> None:
        """Forget the copies of a step that is committed, or was taken back."""
        self._versions = None

    @torch.no_grad()
    def give_back(self) -> list[int]:
        """Restore the tensors to what they were when the step began; return the positions of those without a copy."""
        if self._versions is None:
            return []
        changed = self._changed() | (self._changing or set())
        for number in changed & self._copies.keys():
            tensor, copy = self._tensors[number], self._copies[number]
            if self._places[number] == _place(tensor) and _is_alike(copy, tensor):
                tensor.copy_(copy)
            else:  # the memory that it has now may be shared with another tensor
                tensor.data = copy.clone()
        self._versions = None
        return sorted(changed - self._copies.keys())

    def _changed(self) -> set[int]:
        """Return the positions of the tensors whose version has changed; if all have copies, compare values as well."""
        assert self._versions is not None
        changed = {i for i, (t, v) in enumerate(zip(self._tensors, self._versions, strict=True)) if t._version != v}
        if self._changing is None:
            changed |= {i for i, copy in self._copies.items() if i not in changed and _differ(copy, self._tensors[i])}
        return changed


def _is_alike(copy: Tensor, tensor: Tensor) -> bool:
    return (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, tensor.device)


def _differ(copy: Tensor, tensor: Tensor) -> bool:
    if not _is_alike(copy, tensor):
        return True
    try:
        return not torch.equal(copy, tensor)
    except (RuntimeError, TypeError):  # a layout or a subclass that cannot be compared: its version has to suffice
        return False


def _place(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0
