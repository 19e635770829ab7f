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

from phalanx.transport.tensors import flat

_LANES = 1021
_LANE_BYTES = 8


@functools.cache
def _weights(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the weights are kept, and must serve everywhere
        generator = torch.Generator().manual_seed(0x5048414C)
        weights = torch.randint(-(2**63), 2**63 - 1, (_LANES + _LANE_BYTES,), generator=generator, device="cpu")
        return (weights | 1).to(device)


def has_bytes(tensor: Tensor) -> bool:
    """Return whether `digest` can read the tensor: it cannot reach the elements of nested, quantized and oneDNN's
    tensors.
    """
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_mkldnn)


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return the digest of a tensor's elements in logical order, whatever its strides: a scalar, int64, on its device.

    The tensor must have bytes (see `has_bytes`).

    Cost: it reads the tensor once, at the speed of memory; it copies the tensor if that is not contiguous.
    """
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    elements = flat(dense.resolve_conj().resolve_neg().contiguous())
    if elements.storage_offset() * elements.element_size() % _LANE_BYTES:
        elements = elements.clone()
    content = elements.view(torch.uint8)
    num_lanes = content.numel() // _LANE_BYTES
    lanes, tail = content[: num_lanes * _LANE_BYTES].view(torch.int64), content[num_lanes * _LANE_BYTES :]
    num_full = num_lanes - num_lanes % _LANES
    columns = lanes[:num_full].view(-1, _LANES).sum(0)
    columns[: num_lanes - num_full] += lanes[num_full:]
    weights = _weights(tensor.device)
    return (columns * weights[:_LANES]).sum() + (tail * weights[_LANES : _LANES + len(tail)]).sum() + content.numel()


def digests(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the digest of each tensor, in order: shape (tensors,), int64, on `device`."""
    found = [digest(tensor).to(device) for tensor in tensors]
    return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def find_differences(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the positions at which not every row (one per rank) has the same value, in order."""
    return [position for position, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
