"""Keep master parameters: full-precision copies of device parameters in host memory, for an offloaded optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.shared_updates import register_shared_update
from phalanx.optim.parameter_shard import in_memory_order
from phalanx.optim.plan import Slice, plan_waves
from phalanx.optim.shared_parameters import SharedBlock
from phalanx.optim.staging import HostStaging, lock

_HALF = {torch.float16, torch.bfloat16}
_NOTED_BYTES = 64 << 20  # the maximum number of bytes per note; a note costs a dozen kernels and a copy of the bytes


@dataclass(frozen=True, eq=False)
class _Note:
    """A `_Note` has the result of `HostStaging.note` for slices of some parameters: a checksum, or host values."""

    numbers: tuple[int, ...]
    bits: Any


class MasterParameters(SharedBlock):
    """`MasterParameters` keep masters of `parameters` in a block of host memory, once for all ranks of the host.

    The parameters stay on their devices. Masters of float16 and bfloat16 parameters are float32; all others have the
    parameter's dtype. All ranks' parameters get the values of rank `source`. If rank `source` passes its earlier
    masters as `previous`, the new masters keep their extra precision where the parameter has not been written to since.
    Room for the master of a frozen parameter is reserved, but untouched until the parameter trains. Construction is
    collective.

    `_rounded` has the masters in the parameters' own dtype. It exists if several ranks share masters of float16 or
    bfloat16 parameters: each rank rounds its slices, and all ranks copy half the bytes. A single rank's device rounds.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup,
        stagings: Mapping[torch.device, HostStaging],
        source: int = 0,
        previous: MasterParameters | None = None,
    ) -> None:
        super().__init__(parameters, [master_dtype(p.dtype) for p in parameters], group, in_pages=True)
        self._stagings = stagings
        self._own_dtypes = [p.dtype for p in parameters]
        self._is_half = [dtype in _HALF for dtype in self._own_dtypes]
        self._rounded: SharedBlock | None = None
        if any(self._is_half) and group.size() > 1:
            self._rounded = SharedBlock(parameters, [p.dtype for p in parameters], group, in_pages=True)
        self._masters = [self.shaped(number) for number in range(len(self.parameters))]
        self._parts: dict[int, Slice] = {}  # this rank's slices
        # Notes on slices whose master equalled the parameter when the note was made.
        self._notes: dict[int, _Note] = {}
        self._pushed: list[int] = []  # the parameters that were copied to their devices and have no note yet
        # Whether a master keeps its extra precision where it rounds to the parameter's value.
        self._keeps_precision = [True] * len(self.parameters)
        self._live = [p.requires_grad for p in parameters]
        frozen = None if all(self._live) else SharedBlock(parameters, [p.dtype for p in parameters], group)
        if group.rank() == source:
            for number, parameter in enumerate(self.parameters):
                if self._live[number]:
                    values = parameter.detach() if previous is None else previous.values(number)
                    self._masters[number].copy_(values)
                    self.round(Slice(number, 0, parameter.numel()))
                elif frozen is not None:
                    frozen.shaped(number).copy_(parameter.detach())
        dist.barrier(group=group)
        for number, parameter in enumerate(self.parameters):
            if not self._live[number] and frozen is not None:
                parameter.detach().copy_(frozen.shaped(number))
        self._lock()
        self.push_exact()
        dist.barrier(group=group)  # no rank updates a master that another still reads
        if group.size() > 1:
            register_shared_update(self.parameters, self)

    def move_to(self, memory: Tensor) -> None:
        """Replace the block with `memory`, a private block with the same layout; copy its values to the devices."""
        self.synchronize()
        super().move_to(memory)
        self._masters = [self.shaped(number) for number in range(len(self.parameters))]
        for number, parameter in enumerate(self.parameters):
            if self._live[number]:
                parameter.detach().copy_(self._masters[number])

    def watch(self, parts: Iterable[Slice]) -> None:
        """Detect writes to `parts`, this rank's slices of the parameters on their devices, from now on."""
        self._parts = {part.index: part for part in parts}
        self._pushed = [number for number in self._parts if self._live[number]]
        self.note_pushed()

    def _lock(self) -> None:
        """Page-lock the memory that is copied to devices."""
        for block in (self, self._rounded):
            if block is not None:
                lock(
                    block.memory,
                    [
                        block.byte_range(Slice(number, 0, parameter.numel()))
                        for number, parameter in enumerate(self.parameters)
                        if self._stagings[parameter.device].locks and self._sent(number) is block and self._live[number]
                    ],
                )

    def _sent(self, number: int) -> SharedBlock:
        """Return the block from which a parameter is copied to its device after an update."""
        return self if self._rounded is None or not self._is_half[number] else self._rounded

    def values(self, number: int) -> Tensor:
        """Return a parameter's current values on the host, or the master's where those round to the same values."""
        parameter, master = self.parameters[number], self._masters[number]
        now = parameter.detach().cpu()
        if not self._is_half[number] or not self._live[number]:
            return now
        return torch.where(master.to(now.dtype) == now, master, now.to(master.dtype))

    def pull(self) -> None:
        """Update this rank's slices of masters from the parameters that other code has written.

        Cost: on a device, a checksum of the slices and a wait for it; on the CPU, a comparison with the values sent.
        """
        for device, staging in self._stagings.items():
            here = [n for n in self._parts if self._live[n] and self.parameters[n].device == device]
            notes = list(dict.fromkeys(self._notes[number] for number in here if number in self._notes))
            whole = [note for note in notes if all(self._notes.get(number) is note for number in note.numbers)]
            differ = staging.differ([([self._on_device(n) for n in note.numbers], note.bits) for note in whole])
            known = {n for note, differs in zip(whole, differ, strict=True) if not differs for n in note.numbers}
            for number in here:
                if number not in known:
                    self._pull(number)

    def _on_device(self, number: int) -> Tensor:
        part, parameter = self._parts[number], self.parameters[number]
        return parameter.detach().as_strided((parameter.numel(),), (1,))[part.start : part.stop]

    def _pull(self, number: int) -> None:
        part = self._parts[number]
        master = self.flats[number][part.start : part.stop]
        now = self._on_device(number).cpu()
        if self._is_half[number] and self._keeps_precision[number]:
            master.copy_(torch.where(master.to(now.dtype) == now, master, now.to(master.dtype)))
        else:
            master.copy_(now)
        self.round(part)

    def load(self, part: Slice, values: Tensor | None) -> None:
        """Set this rank's slice of a master to `values`; with None, the next `pull` copies the parameter's values.

        The next `pull` also replaces `values` that do not round to the parameter's values.
        """
        self._keeps_precision[part.index] = values is not None
        self._notes.pop(part.index, None)
        if values is not None:
            like = self.parameters[part.index]
            flat = (
                in_memory_order(values, like) if values.shape == like.shape else values
            )  # otherwise `values` is a slice
            self.flats[part.index][part.start : part.stop].copy_(flat)

    def has_more(self, number: int) -> bool:
        """Return whether the master is more precise than the parameter."""
        return self._is_half[number]

    def round(self, part: Slice) -> None:
        """Write the rounded values of this rank's slice, if there is a block of rounded values."""
        if self._is_half[part.index] and self._rounded is not None:
            master = self.flats[part.index][part.start : part.stop]
            self._rounded.flats[part.index][part.start : part.stop].copy_(master)

    def synchronize(self) -> None:
        """Wait until this rank no longer reads masters."""
        for staging in self._stagings.values():
            staging.synchronize()

    def activate_unfrozen(self) -> None:
        """Record which parameters are no longer frozen."""
        for number, parameter in enumerate(self.parameters):
            if parameter.requires_grad and not self._live[number]:
                self._live[number], self._keeps_precision[number] = True, False

    def push(self, numbers: Set[int] | None = None) -> None:
        """Start copying parameters `numbers`, by default all, to their devices; `note_pushed` must follow.

        Rounded values are copied where they exist, and masters otherwise.
        """
        chosen = range(len(self.parameters)) if numbers is None else sorted(numbers)
        self._copy([(number, self._sent(number).shaped(number)) for number in chosen])

    def push_exact(self) -> None:
        """Copy all masters to the devices, even where rounded values exist, and wait for the copies."""
        self._copy(list(enumerate(self._masters)))
        self.note_pushed()
        self.synchronize()

    def _copy(self, pairs: Sequence[tuple[int, Tensor]]) -> None:
        for device, staging in self._stagings.items():
            here = [(n, host) for n, host in pairs if self._live[n] and self.parameters[n].device == device]
            tensors = [self.parameters[number].detach() for number, _ in here]
            staging.to_device(tensors, [host.detach() for _, host in here])
            for number, _ in here:
                self._keeps_precision[number] = True
            self._pushed += [number for number, _ in here if number in self._parts]

    def note_pushed(self) -> None:
        """Record the new bits of the copied parameters, to detect later writes."""
        pushed, self._pushed = list(dict.fromkeys(self._pushed)), []  # an interrupted update may also have copied some
        for device, staging in self._stagings.items():
            here = [number for number in pushed if self.parameters[number].device == device]
            if here:
                staging.queue_after_copies(functools.partial(self._note, here))

    def _note(self, numbers: Sequence[int]) -> None:
        """Record the bits that this rank's slices have on their device after the copies queued so far."""
        counts = [self._parts[number].stop - self._parts[number].start for number in numbers]
        sizes = [count * self.parameters[n].element_size() for n, count in zip(numbers, counts, strict=True)]
        for together in plan_waves(sizes, _NOTED_BYTES) if numbers else ():
            some = tuple(numbers[at] for at in together)
            flats, hosts = [self._on_device(number) for number in some], [self._sent_slice(n) for n in some]
            note = _Note(some, self._stagings[flats[0].device].note(flats, hosts))
            self._notes.update(dict.fromkeys(some, note))

    def _sent_slice(self, number: int) -> Tensor:
        return self._sent(number).flats[number].detach()[self._parts[number].start : self._parts[number].stop]

    def find_moved(self) -> int | None:
        """Return the number of the first parameter that was moved to a device or dtype that has no masters, or None."""
        for number, parameter in enumerate(self.parameters):
            if parameter.device not in self._stagings or master_dtype(parameter.dtype) != self.dtypes[number]:
                return number
            if self._is_half[number] != (parameter.dtype in _HALF):
                return number
            if self._rounded is not None and parameter.dtype != self._own_dtypes[number]:  # it has the old dtype
                return number
        return None


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which a parameter of this dtype is updated."""
    return torch.float32 if dtype in _HALF else dtype
