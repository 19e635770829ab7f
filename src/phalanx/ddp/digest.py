"""Compute a 64-bit digest of each tensor on its device, to compare tensors between ranks.

The bytes are read as 64-bit lanes, in rows of a prime number of lanes (so they do not align with rows of a weight):

    lanes    a0 a1 ... a1020                   digest = sum over columns of w_j * (column sum), modulo 2^64,
             a1021 ...                                  plus the bytes of an incomplete lane, and the number of bytes
    weights  w0 w1 ... w1020   odd, random and the same on all ranks

A change of one lane always changes the digest. Several changes cancel each other with a probability near 2^-63. The
digest is a checksum, not a cryptographic hash: two tensors with the same digest can be constructed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from phalanx.ddp.invisible import outside_modes

_LANES = 1021
_LANE_BYTES = 8
_PIECE_BYTES = 128 * _LANES * _LANE_BYTES


@functools.cache
def _weights(device: torch.device) -> Tensor:
    with outside_modes(), torch.inference_mode(False):  # the weights are cached, so they must be ordinary tensors
        generator = torch.Generator().manual_seed(0x5048414C)
        weights = torch.randint(-(2**63), 2**63 - 1, (_LANES + _LANE_BYTES,), generator=generator, device="cpu")
        return (weights | 1).to(device)


@torch.no_grad()
def digest(elements: Tensor) -> Tensor:
    """Return the digest of a one-dimensional tensor of stride 1, as an int64 scalar on the tensor's device.

    Cost: reads the tensor once, at memory speed, without a copy; a tensor whose storage offset is not a multiple of 8
    bytes is copied in pieces of one megabyte.
    """
    content = elements.view(torch.uint8)
    weights = _weights(content.device)
    num_lanes = content.numel() // _LANE_BYTES
    is_aligned = content.storage_offset() % _LANE_BYTES == 0
    columns = torch.zeros(_LANES, dtype=torch.int64, device=content.device)
    piece_bytes = max(content.numel(), 1) if is_aligned else _PIECE_BYTES
    for piece in torch.split(content[: num_lanes * _LANE_BYTES], piece_bytes):
        lanes = (piece if is_aligned else piece.clone()).view(torch.int64)
        num_full = lanes.numel() - lanes.numel() % _LANES
        columns += lanes[:num_full].view(-1, _LANES).sum(0)
        columns[: lanes.numel() - num_full] += lanes[num_full:]
    tail = content[num_lanes * _LANE_BYTES :]
    return (columns * weights[:_LANES]).sum() + (tail * weights[_LANES : _LANES + len(tail)]).sum() + content.numel()


def digests(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """Return the digests of `tensors`, in order, as an int64 vector on `device`. The digest of None is 0."""
    found = [
        torch.zeros((), dtype=torch.int64, device=device) if elements is None else digest(elements).to(device)
        for elements in tensors
    ]
    return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def find_differences(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the positions, in order, at which the rows (one per rank) differ. A 0 is ignored: it means no value."""
    return [position for position, column in enumerate(zip(*rows, strict=True)) if len(set(column) - {0}) > 1]
