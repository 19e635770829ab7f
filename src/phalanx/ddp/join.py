"""PyTorch's `Join` around our wrapper: ranks that have left the `with` block shadow what the others still do.

                  rank 0: has left                          rank 1: trains
 Join             all_reduce: how many train?   <-------->  forward: notify_join_context
 main_hook        census                        <-------->  forward: census
                  buffers                       <-------->  forward: buffers
                  a round of zeros              <-------->  backward: a round of gradients
 ...
 post_hook        all leave: parameters and buffers of the last rank become everybody's

Works over any group. Without `Join` the wrapper does better where it can: see `uneven`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook

from phalanx.ddp.uneven import are_shared
from phalanx.diagnostics.divergence import EVEN_ADVICE
from phalanx.nn.sync_batchnorm import SyncBatchNorm


@dataclass(frozen=True)
class Stance:
    """What a rank does in one forward."""

    active: bool
    """False: it has left the context, and shadows."""
    syncs: bool = False
    """Whether the backward that follows averages."""
    decides: bool = False
    """Whether sync_batchnorm="auto" decides now."""


@dataclass(frozen=True)
class JoinState:
    """All ranks' stances in one forward, by rank."""

    stances: tuple[Stance, ...]

    @property
    def num_active(self) -> int:
        """How many ranks still train."""
        return sum(stance.active for stance in self.stances)

    @property
    def source(self) -> int:
        """Whose buffers serve all: the highest rank that trains, as in PyTorch."""
        return max(rank for rank, stance in enumerate(self.stances) if stance.active)

    @property
    def syncs(self) -> bool:
        """Whether a round of gradients follows."""
        return any(stance.syncs for stance in self.stances)

    @property
    def decides(self) -> bool:
        """Whether the smallest batch is looked for."""
        return any(stance.decides for stance in self.stances)


def gather_join_state(stance: Stance, group: dist.ProcessGroup, device: torch.device) -> JoinState:
    """Tell all ranks of this rank's stance, and learn theirs. Collective: one all_gather of 3 numbers."""
    rows = _gather([stance.active, stance.syncs, stance.decides], group, device)
    return JoinState(tuple(Stance(*map(bool, row)) for row in rows))


def find_last(is_last: bool, group: dist.ProcessGroup, device: torch.device) -> int:
    """The highest rank among those that left last. Collective."""
    rows = _gather([is_last], group, device)
    return max(rank for rank, row in enumerate(rows) if row[0])


def _gather(row: list[bool], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    mine = torch.tensor([int(value) for value in row], device=device)
    rows: list[Tensor] = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    return [one.tolist() for one in rows]


def refuse_join_shadow(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Refuse to stand in for a rank whose forward or update the others need.

    Raises:
        RuntimeError: batch statistics are over all ranks, or each rank updates a part of the parameters.
    """
    here = f"Join on rank {group.rank()}"
    if any(isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) for layer in module.modules()):
        raise RuntimeError(
            f"{here}: the model has SyncBatchNorm layers, whose collectives in forward a rank without a batch can't "
            "shadow. On backend 'phalanx' with all ranks on one host train without Join; elsewhere pass "
            "throw_on_early_termination=True, or give every rank the same number of batches."
        )
    if are_shared(module.parameters(), group):
        raise RuntimeError(
            f"{here}: with phalanx.ZeroRedundancyOptimizer every rank updates a part of the parameters, which nobody "
            f"else can. {EVEN_ADVICE}."
        )


class JoinShadow(JoinHook):
    """What `Join` calls on a rank that has left: `stand_in` for each step of the others, `end(is_last)` at the end."""

    def __init__(self, stand_in: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._stand_in = stand_in
        self._end = end

    def main_hook(self) -> None:
        """JoinShadow one forward and backward."""
        self._stand_in()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have left."""
        self._end(is_last_joiner)
