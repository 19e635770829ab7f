"""Support PyTorch's `Join`: ranks that have left the `with` block shadow the collectives of the others.

                  rank 0: has left                          rank 1: trains
 Join             all_reduce: how many train?   <-------->  forward: notify_join_context
 main_hook        join state                    <-------->  forward: join state
                  buffers                       <-------->  forward: buffers
                  a round of zeros              <-------->  backward: a round of gradients
 ...
post_hook        all leave: all ranks get the parameters and buffers of the last rank

Groups of any backend are supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from phalanx._comm.backend.shared import sharing_group
from phalanx._comm.backend.shared_updates import has_shared_update
from phalanx._comm.diagnostics.divergence import EVEN_ADVICE
from phalanx.ddp.batchnorm import sync_if_small
from phalanx.ddp.replicate import broadcast_tensors, gather_rows
from phalanx.nn.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from phalanx.ddp.reducer import Reducer


@dataclass(frozen=True)
class JoinStatus:
    """A `JoinStatus` describes how a rank takes part in one forward."""

    active: bool
    """Whether this rank is in the context; a rank that has left it shadows the others."""
    syncs: bool = False
    """Whether the backward of this forward averages gradients."""
    decides: bool = False
    """Whether sync_batchnorm="auto" decides in this forward."""


@dataclass(frozen=True)
class JoinState:
    """A `JoinState` has all ranks' statuses in one forward, by rank."""

    statuses: tuple[JoinStatus, ...]

    @property
    def num_active(self) -> int:
        """Return the number of ranks that still train."""
        return sum(status.active for status in self.statuses)

    @property
    def source(self) -> int:
        """Return the rank whose buffers all ranks get: the highest rank that trains, as in PyTorch."""
        return max(rank for rank, status in enumerate(self.statuses) if status.active)

    @property
    def syncs(self) -> bool:
        """Return whether a round of gradients follows."""
        return any(status.syncs for status in self.statuses)

    @property
    def decides(self) -> bool:
        """Return whether ranks agree on their smallest batch in this forward, for sync_batchnorm="auto"."""
        return any(status.decides for status in self.statuses)


def gather_join_state(status: JoinStatus, group: dist.ProcessGroup, device: torch.device) -> JoinState:
    """Gather all ranks' statuses. All ranks call it. Cost: one all_gather of 3 numbers."""
    rows = _gather([status.active, status.syncs, status.decides], group, device)
    return JoinState(tuple(JoinStatus(*map(bool, row)) for row in rows))


def find_last(is_last: bool, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the highest rank among those that left last. All ranks call it."""
    rows = _gather([is_last], group, device)
    return max(rank for rank, row in enumerate(rows) if row[0])


def _gather(row: list[bool], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    mine = torch.tensor([int(value) for value in row], device=device)
    return gather_rows(mine, group)


def refuse_join_shadow(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Refuse to shadow ranks whose forward or update needs this rank's own batch.

    Raises:
        RuntimeError: BatchNorm layers span all ranks, or each rank updates only a part of the parameters.
    """
    here = f"Join on rank {group.rank()}"
    if any(isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) for layer in module.modules()):
        raise RuntimeError(
            f"{here}: the model has SyncBatchNorm layers, whose collectives in forward need a batch from every "
            "rank. Pass throw_on_early_termination=True, or give every rank the same number of batches."
        )
    sharing = sharing_group(group)  # ZeroRedundancyOptimizer moves parameters, or master parameters, into its memory
    if any(
        has_shared_update(parameter) or (sharing is not None and sharing.symm_mem.contains(parameter.data_ptr()))
        for parameter in module.parameters()
    ):
        raise RuntimeError(
            f"{here}: with phalanx.ZeroRedundancyOptimizer, only one rank can update each part of the parameters. "
            f"{EVEN_ADVICE}."
        )


class JoinShadow(JoinHook):
    """A `JoinShadow` runs on a rank that left `Join`: `shadow_step` per step of the others, then `end(is_last)`."""

    def __init__(self, shadow_step: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._shadow_step = shadow_step
        self._end = end

    def main_hook(self) -> None:
        self._shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the model of a rank that left last, once all ranks have left."""
        self._end(is_last_joiner)


class JoinInterface(nn.Module, Joinable):
    """A `JoinInterface` is the wrapper's part of `Join`: its actions around a forward, and on a rank that has left."""

    process_group: dist.ProcessGroup
    module: nn.Module
    device: torch.device
    broadcast_buffers: bool
    _reducer: Reducer
    _buffers_stale: bool
    _batchnorm_undecided: bool
    _divide_by_initial_world_size: bool
    if TYPE_CHECKING:

        def _synced_buffers(self) -> list[Tensor]: ...
        def _state(self) -> list[Tensor]: ...

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return PyTorch's context manager for uneven inputs, on any backend: ranks that left shadow the others.

        Arguments:
            divide_by_initial_world_size: divide the sum of gradients by the group's size, that is, count the ranks that
                have left as zeros. False divides by the number of ranks that still train.
            enable: False does nothing.
            throw_on_early_termination: raise RuntimeError on all ranks when the first rank has left.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that `torch.distributed.algorithms.Join` calls on a rank that has left it."""
        self._divide_by_initial_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        return JoinShadow(self._shadow_step, self._broadcast_last)

    @property
    def join_device(self) -> torch.device:
        """Return the device of the tensors that `Join` sends."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Return the group over which `Join` counts ranks."""
        return self.process_group

    def _announce(self, sync: bool) -> int:
        """Announce a forward to ranks that left a Join context; return the rank whose buffers all ranks get."""
        self._reducer.end_watch()  # ranks would observe different steps
        counted = Join.notify_join_context(self)
        if counted is not None:
            counted.wait()
        status = JoinStatus(active=True, syncs=sync, decides=self._batchnorm_undecided and self.training and sync)
        join_state = gather_join_state(status, self.process_group, self.device)
        divides_by_all = self._divide_by_initial_world_size
        self._reducer.rescale = 1.0 if divides_by_all else self.process_group.size() / join_state.num_active
        return join_state.source

    def _shadow_step(self) -> None:
        """Shadow the others' forward and backward on this rank, which has left a Join context.

        Raises:
            RuntimeError: a layer or an optimizer needs every rank's own batch.
        """
        self._reducer.end_watch()
        refuse_join_shadow(self.module, self.process_group)
        join_state = gather_join_state(JoinStatus(active=False), self.process_group, self.device)
        if join_state.decides:
            self._batchnorm_undecided = False
            sync_if_small(self.module, (), self.process_group, self.device)
            refuse_join_shadow(self.module, self.process_group)
        if self.broadcast_buffers and self._buffers_stale:
            broadcast_tensors(self._synced_buffers(), self.process_group, join_state.source)
        self._buffers_stale = join_state.syncs
        if join_state.syncs:
            self._reducer.shadow_step()

    def _broadcast_last(self, is_last: bool) -> None:
        """Broadcast the model of a rank that left last, at the end of a Join context."""
        source = find_last(is_last, self.process_group, self.device)
        broadcast_tensors(self._state(), self.process_group, source)
        self._reducer.rescale = 1.0
