"""Keep an offloaded optimizer's state in the host's memory, each rank's part in a piece of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.transport.tensors import is_dense
from phalanx.optim.plan import LINE, Extent, Plan

# The hungriest optimizers in torch.optim (centered RMSprop, Adam with amsgrad) keep three numbers an element.
_STATES = 4


class SharedState:
    """It has room for four numbers per element that a rank updates; unused room costs no memory. All ranks make it."""

    def __init__(self, extents: Sequence[Extent], plan: Plan, group: dist.ProcessGroup) -> None:
        from phalanx._comm.backend.shared import shared_empty  # needs the C core, which a group that shares memory has

        nbytes = max(
            sum(_STATES * ((part.stop - part.start) * extents[part.index].itemsize + LINE) for part in parts)
            for parts in plan
        )
        self._memory = shared_empty(max(nbytes, 1), dtype=torch.uint8, group=group)
        self._used = 0
        self._places: dict[tuple[int, str], Tensor] = {}

    def adopt(self, number: int, state: dict[str, Any]) -> None:
        """Move here what the state of parameter `number` has for each element; what finds no room stays."""
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.is_cpu and is_dense(value):
                place = self._place(number, key, value)
                if place is not None and place.data_ptr() != value.data_ptr():
                    state[key] = place.copy_(value)

    def _place(self, number: int, key: str, value: Tensor) -> Tensor | None:
        known = self._places.get((number, key))
        if known is not None and known.dtype == value.dtype and known.shape == value.shape:
            return known
        stop = self._used + -(-value.nbytes // LINE) * LINE
        if known is not None or stop > self._memory.numel() or value.numel() == 0:
            return None
        flat = torch.frombuffer(self._memory.numpy(), dtype=value.dtype, count=value.numel(), offset=self._used)
        self._used = stop
        self._places[number, key] = flat.as_strided(value.shape, value.stride())
        return self._places[number, key]
