"""Compute a digest of 64 bits for each tensor, on its device, that tells other bytes from the same.

The bytes are read as 64-bit lanes, in rows of a prime number of lanes (so that rows of a weight never line up with it):

    lanes    a0 a1 ... a1020                   digest = sum over columns of w_j * (column sum), modulo 2^64,
             a1021 ...                                  plus the bytes that fill no lane, and how many bytes there are
    weights  w0 w1 ... w1020   odd, random and the same on all ranks

A lane that changes always changes the digest. That other changes cancel has a chance near 2^-63 each. It is a checksum,
no cryptographic hash: two tensors with one digest can be constructed.
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
    with outside_modes(), torch.inference_mode(False):  # the weights are kept, and must serve everywhere
        generator = torch.Generator().manual_seed(0x5048414C)
        weights = torch.randint(-(2**63), 2**63 - 1, (_LANES + _LANE_BYTES,), generator=generator, device="cpu")
        return (weights | 1).to(device)


@torch.no_grad()
def digest(elements: Tensor) -> Tensor:
    """Return the digest of the bytes of a tensor of one dimension and stride 1: a scalar, int64, on its device.

    Cost: it reads the tensor once, at the speed of memory, and copies nothing; a tensor that begins in the middle of
    a lane is copied, one megabyte at a time.
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
    """Return the digest of each tensor, in order: shape (tensors,), int64, on `device`. That of None is 0."""
    found = [
        torch.zeros((), dtype=torch.int64, device=device) if elements is None else digest(elements).to(device)
        for elements in tensors
    ]
    return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def find_differences(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the positions at which not every row (one per rank) has the same value, in order. 0 is no value."""
    return [position for position, column in enumerate(zip(*rows, strict=True)) if len(set(column) - {0}) > 1]
