"""Detect the same batches in the same order in every epoch, which a forgotten `sampler.set_epoch` leaves.

steps      a b c d e f g  a b c d e f g  a ...
compared   kept |          ^ ^ ^ the three that came first, in their order: the second epoch is the first again
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx.ddp.digest import has_bytes
from phalanx.transport.tensors import is_dense

NUM_BATCHES = 3
"""The number of batches that are no accident where they come in the order of the beginning."""

# about so many elements of each tensor are looked at: that takes microseconds, however large a batch is
_NUM_ELEMENTS = 256

# torch.equal knows these on the CPU; of the others some, in some versions, for some strides.
_COMPARED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)

Probe = tuple[Tensor, ...]


class EpochOrder:
    """An `EpochOrder` sees the batches of one rank go by, until it has seen the first ones come back."""

    def __init__(self) -> None:
        self._first: list[Probe] = []
        self._position = 0  # how many of the first batches have just come again
        self._blind = False
        self.num_steps = 0

    def repeats(self, inputs: Iterable[Tensor]) -> bool:
        """Return whether, with this batch, the first `NUM_BATCHES` have come again in their order.

        It is never True if two of the first are alike, or if there are tensors that torch can't compare, or that are
        not on the CPU: to look at those would stall the device.

        Cost: it compares some 256 elements of each tensor.
        """
        if self._blind:
            return False
        self.num_steps += 1
        tensors = list(inputs)
        if not tensors or not all(map(_can_be_seen, tensors)):
            self._blind = True
            return False
        probe = tuple(_sample(tensor) for tensor in tensors)
        if len(self._first) < NUM_BATCHES:
            self._blind = any(_equal(probe, kept) for kept in self._first)
            self._first.append(tuple(tensor.clone() for tensor in probe))
        elif _equal(probe, self._first[self._position]):
            self._position += 1
        else:
            self._position = int(_equal(probe, self._first[0]))
        if self._position < NUM_BATCHES:
            return False
        self._blind = True
        self._first.clear()
        return True


def explain_repetition(num_steps: int) -> str:
    """Return what to do when the first batches have come again at step `num_steps`."""
    return (
        f"steps {num_steps - NUM_BATCHES + 1} to {num_steps} were given the batches of steps 1 to {NUM_BATCHES} again, "
        "in the same order, so every epoch shows the data in one order. With torch's DistributedSampler call "
        "sampler.set_epoch(epoch) before each epoch; phalanx.DistributedSampler goes on by itself. A Trainer or a "
        "strategy shuffles where its loader does (shuffle=True). If one order is what you want, nothing is wrong"
    )


def _can_be_seen(tensor: Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and has_bytes(tensor)
    return plain and tensor.dtype in _COMPARED


def _sample(tensor: Tensor) -> Tensor:
    """Return elements from all over the tensor, as a view: its beginning may be the margin of a picture."""
    tensor = tensor.detach()
    if not is_dense(tensor):
        tensor = tensor[:1].contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat[:: max(1, flat.numel() // _NUM_ELEMENTS)]


def _equal(one: Probe, other: Probe) -> bool:
    return len(one) == len(other) and all(torch.equal(mine, kept) for mine, kept in zip(one, other, strict=True))
