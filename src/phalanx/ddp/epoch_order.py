"""Detect that every epoch has the same batches in the same order, because `sampler.set_epoch` was forgotten.

steps      a b c d e f g  a b c d e f g  a ...
compared   kept |          ^ ^ ^ the first three, in the same order: the second epoch repeats the first
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ddp.graph import find_tensors
from phalanx.ddp.invisible import all_elements_of, invisible

NUM_BATCHES = 3
"""The number of first batches to keep: enough that a repetition in the same order is no coincidence."""

MOST_STEPS = 1000
"""The number of steps after which the search for the first batches ends."""

MOST_OBJECTS = 1000
"""The maximum number of objects in forward's inputs; larger inputs are not compared."""

# About this many elements of each tensor are compared, which takes microseconds for any batch.
_NUM_ELEMENTS = 256

# torch.equal supports these on the CPU; for other dtypes, it fails in some versions for some strides.
_COMPARED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)

Probe = list[Tensor]


class EpochOrder:
    """An `EpochOrder` compares each of a rank's batches with the rank's first batches, until those are repeated."""

    def __init__(self) -> None:
        self._first: list[Probe] = []
        self._position = 0  # how many of the first batches the latest steps have repeated
        self.disabled = False
        """Whether batches are no longer compared."""
        self.num_steps = 0

    @invisible
    def repeats(self, inputs: object) -> bool:
        """Return whether this batch completes a repetition of the first `NUM_BATCHES` batches, in the same order.

        The result is never True if two of the first batches are equal, if torch cannot compare the tensors, or if the
        tensors are not on the CPU: comparing them would synchronize with their device.

        Cost: compares about 256 elements of each tensor, up to the first difference, in at most `MOST_STEPS` steps.
        """
        self.num_steps += 1
        tensors, is_complete = find_tensors(inputs, MOST_OBJECTS)
        probe = all_elements_of(tensors)
        if probe is None or not is_complete or self.num_steps > MOST_STEPS or not all(map(_can_be_compared, probe)):
            self.disabled = True
            self._first.clear()
            return False
        if len(self._first) < NUM_BATCHES:
            self.disabled = any(_equal(probe, kept) for kept in self._first)
            self._first.append([_sample(elements).clone() for elements in probe])
        elif _equal(probe, self._first[self._position]):
            self._position += 1
        else:
            self._position = int(_equal(probe, self._first[0]))
        if self._position < NUM_BATCHES:
            return False
        self.disabled = True
        self._first.clear()
        return True


def explain_repetition(num_steps: int) -> str:
    """Return the warning, with advice, that the first batches were repeated at step `num_steps`."""
    return (
        f"steps {num_steps - NUM_BATCHES + 1} to {num_steps} were given the batches of steps 1 to {NUM_BATCHES} again, "
        "in the same order, so every epoch has the same order. With torch's DistributedSampler, call "
        "sampler.set_epoch(epoch) before each epoch; phalanx.DistributedSampler advances by itself. A Trainer or a "
        "strategy shuffles if the loader does (shuffle=True). Ignore this warning if you want a fixed order"
    )


def _can_be_compared(elements: Tensor) -> bool:
    return elements.is_cpu and elements.dtype in _COMPARED


def _sample(elements: Tensor) -> Tensor:
    """Return evenly spaced elements as a view: the first elements alone may be the blank margin of an image."""
    return elements[:: max(1, elements.numel() // _NUM_ELEMENTS)]


def _equal(probe: Probe, kept: Probe) -> bool:
    return len(probe) == len(kept) and all(
        mine.dtype == other.dtype and torch.equal(_sample(mine), other) for mine, other in zip(probe, kept, strict=True)
    )
