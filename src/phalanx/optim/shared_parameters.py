"""Move an optimizer's parameters into one block of memory that all ranks of the host share."""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger
from phalanx._base.malloc import release_freed_memory
from phalanx._comm.backend.gradient_shards import is_partial
from phalanx._comm.backend.shared import sharing_group
from phalanx._comm.backend.shared_updates import (
    register_readers,
    register_shared_update,
    unregister_readers,
    unregister_shared_update,
)
from phalanx._comm.backend.torch_integration.shared_loads import wait_before_loads
from phalanx._comm.diagnostics.flight_recorder import read_position
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._comm.transport.tensors import is_dense
from phalanx.optim.plan import ParameterExtent, Slice, plan_offsets
from phalanx.optim.rank_words import RankWords

PAGE = 4096


def whole_pages(nbytes: int) -> int:
    """Round bytes up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class SharedBlock:
    """A `SharedBlock` has room in host memory for `parameters`, in the given `dtypes`. Construction is collective.

    With `in_pages` it shares no page with another block.

    memory   the block, as bytes
    flats    each parameter's elements in memory order; each in its own storage, so that torch.save writes no others
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        group: dist.ProcessGroup,
        *,
        in_pages: bool = False,
    ) -> None:
        from phalanx._comm.backend.shared import shared_empty  # needs the C core, which a group that shares memory has

        self.group = group
        self.parameters = list(parameters)
        self.dtypes = list(dtypes)
        self.extents = [ParameterExtent(p.numel(), dtype.itemsize) for p, dtype in zip(parameters, dtypes, strict=True)]
        self.offsets, nbytes = plan_offsets(self.extents)
        room = whole_pages(nbytes) + PAGE if in_pages else max(nbytes, 1)
        self.memory = shared_empty(room, dtype=torch.uint8, group=group, owner=0)
        if in_pages:
            start = -self.memory.data_ptr() % PAGE  # the same on every rank, since heaps begin at a page
            self.memory = self.memory[start : start + max(nbytes, 1)]
        self.flats = [self._flat(number) for number in range(len(self.parameters))]

    def _flat(self, number: int) -> Tensor:
        dtype, extent = self.dtypes[number], self.extents[number]
        if extent.numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self.memory.numpy(), dtype=dtype, count=extent.numel, offset=self.offsets[number])

    def shaped(self, number: int) -> Tensor:
        """Return a parameter's elements with the parameter's shape, and with its strides if it is dense."""
        flat, like = self.flats[number], self.parameters[number]
        return flat.as_strided(like.shape, like.stride()) if is_dense(like) else flat.view(like.shape)

    def move_to(self, memory: Tensor) -> None:
        """Replace the block by `memory`, a private block of this rank with the same layout."""
        self.memory = memory
        self.flats = [self._flat(number) for number in range(len(self.parameters))]

    def byte_range(self, part: Slice) -> tuple[int, int]:
        """Return a slice's range of bytes in the block."""
        at, itemsize = self.offsets[part.index], self.extents[part.index].itemsize
        return at + part.start * itemsize, at + part.stop * itemsize


class SharedParameters(SharedBlock):
    """`SharedParameters` moves `parameters` into one block of host memory, with the values of rank `source`.

    Construction is collective.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
        super().__init__(parameters, [p.dtype for p in parameters], group)
        views = [self.shaped(number) for number in range(len(self.parameters))]
        if group.rank() == source:
            for parameter, view in zip(self.parameters, views, strict=True):
                view.copy_(parameter.detach())
        dist.barrier(group=group)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        if group.size() > 1:
            register_shared_update(self.parameters, self)
            register_readers(self, Readers(group).await_others)
            wait_before_loads()
            _addresses.update((parameter, parameter.data_ptr()) for parameter in self.parameters)
            _register_hook()
        release_freed_memory()

    def move_to(self, memory: Tensor) -> None:
        super().move_to(memory)
        unregister_readers(self)
        for number, parameter in enumerate(self.parameters):
            parameter.data = self.shaped(number)

    def find_moved(self) -> int | None:
        """Return the number of the first parameter that is no longer in the block, or None."""
        for number, (parameter, flat) in enumerate(zip(self.parameters, self.flats, strict=True)):
            if parameter.data_ptr() != flat.data_ptr() or parameter.dtype != flat.dtype:
                return number
        return None


_addresses: MutableMapping[Tensor, int] = WeakIdKeyDictionary()  # of each moved parameter, its address in the block
_sharers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def exempt(optimizer: Optimizer) -> None:
    """Allow `optimizer` to write to shared parameters, because it updates only this rank's slices."""
    _sharers.add(optimizer)


@functools.cache
def _register_hook() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _args: Any, _options: Any) -> None:
    """Move shared parameters that another optimizer is about to update to this rank's own memory.

    No rank still writes to the block: all ranks have completed the last step of the optimizer that shares it.
    """
    if not _addresses or optimizer in _sharers:
        return
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is None or parameter not in _addresses or parameter.data_ptr() != _addresses[parameter]:
            continue
        if is_partial(parameter):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: a parameter of shape {tuple(parameter.shape)} belongs to a "
                "ZeroRedundancyOptimizer with gather_gradients=False: this rank has only a slice of its gradient. "
                "To change the optimizer of a model, use gather_gradients=True."
            )
        parameter.data = parameter.detach().clone()
        del _addresses[parameter]
        unregister_shared_update(parameter)


_LOADS = 1 << 20  # word = _LOADS * (number of collectives that the rank has called) + number of its loads since then
_MIN_POLL_S, _MAX_POLL_S = 20e-6, 1e-3
_TIMEOUT_S = 10.0

_logger = get_logger(__name__)


class Readers:
    """`Readers` are the ranks of `group`, which may read the parameters that they share. Construction is collective.

    A rank publishes in a word how many loads it has begun. Another rank no longer reads if it has begun the same load,
    or while it waits in a collective that this rank has not called yet, such as the barrier after a load on one rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._words = RankWords(group)
        self._last = 0

    def await_others(self) -> None:
        """Wait, at most ten seconds, until no other rank reads the memory that this rank is about to overwrite."""
        ours = sharing_group(self._group)
        if ours is None or ours.symm_mem.closed:
            return
        core, rank = ours.symm_mem.core, self._group.rank()
        number = self._last = max(self._last, core.seq * _LOADS) + 1
        self._words.store(number)

        def reads(other: int) -> bool:
            if self._words.load(other) >= number or not core.alive(other):
                return False
            position = read_position(core, other)
            return not (position.inside and position.seq > core.seq)

        others = [other for other in range(self._group.size()) if other != rank]
        if not Deadline.after(_TIMEOUT_S).wait_until(lambda: not any(map(reads, others)), _MIN_POLL_S, _MAX_POLL_S):
            late = tuple(filter(reads, others))
            _logger.warning(
                "load_state_dict on rank %d: all ranks of this host share the parameters, and %s may still read them, "
                "having neither called load_state_dict nor entered a collective. The load continues after %.0f s.",
                rank,
                name_ranks(late),
                _TIMEOUT_S,
            )
