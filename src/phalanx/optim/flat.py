"""`Flat` copies many tensors into few blocks for collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.shared import shares_memory


class Flat:
    """A `Flat` has room for a copy of each of `tensors`, in one block per dtype and device.

        blocks   the flat buffers; in symmetric memory, and reduced without a copy, if the group's ranks share memory
        views    for each tensor, its copy, with the tensor's shape

    If the group's ranks share memory, construction is collective. `tensors` may be a function that returns tensors of
    the same shapes each time, since some modules replace their buffers. `device` overrides the tensors' device.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor] | Callable[[], Sequence[Tensor]],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._find: Callable[[], Sequence[Tensor]] = tensors if callable(tensors) else list(tensors).copy
        tensors = self._find()
        kinds: dict[tuple[torch.dtype, torch.device], int] = {}
        for tensor in tensors:
            kind = tensor.dtype, device or tensor.device
            kinds[kind] = kinds.get(kind, 0) + tensor.numel()
        memory = {kind: _allocate(numel, *kind, group) for kind, numel in kinds.items()}
        self.blocks = list(memory.values())
        self.views: list[Tensor] = []
        used = dict.fromkeys(kinds, 0)
        for tensor in tensors:
            kind = tensor.dtype, device or tensor.device
            start = used[kind]
            used[kind] = start + tensor.numel()
            self.views.append(memory[kind][start : used[kind]].view(tensor.shape))

    def copy_in(self) -> None:
        _copy(self.views, self._find())

    def copy_out(self) -> None:
        """Copy the blocks back into the tensors."""
        _copy(self._find(), self.views)

    @property
    def numbers(self) -> list[Tensor]:
        """Return the blocks for collectives, complex ones as pairs of real numbers."""
        return [torch.view_as_real(block) if block.is_complex() else block for block in self.blocks]

    def average(self, group: dist.ProcessGroup, counting: Sequence[int]) -> None:
        """Average every block over the ranks in `counting`. All ranks call it; the tensors do not change.

        Numerics: the sum over these ranks divided by their number; bitwise identical on all ranks.
        """
        for numbers in self.numbers:
            if group.rank() not in counting:
                numbers.zero_()
            dist.all_reduce(numbers, group=group)
            numbers /= len(counting)

    def broadcast(self, group: dist.ProcessGroup, root: int = 0) -> None:
        """Overwrite every block with the block of rank `root`. All ranks call it."""
        for numbers in self.numbers:
            dist.broadcast(numbers, group=group, group_src=root)


def _allocate(numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and device.type == "cpu" and shares_memory(group):
        from phalanx._comm.backend.shared import shared_empty  # here, since it needs the C core

        return shared_empty(numel, dtype=dtype, group=group)
    return torch.empty(numel, dtype=dtype, device=device)


def _copy(to: Sequence[Tensor], from_: Sequence[Tensor]) -> None:
    for one, other in zip(to, from_, strict=True):
        one.detach().copy_(other.detach())
