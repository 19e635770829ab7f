"""What each rank contributes, such that every rank can work out alone what all of them contributed."""

from __future__ import annotations

import functools
import operator

import numpy as np
import torch
from torch.distributed import ReduceOp

INTEGERS = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
MOVED_ONLY = (torch.float8_e4m3fn, torch.float8_e5m2)
EVERY_DTYPE = (torch.bool, *INTEGERS, *HALVES, *FLOATS, *COMPLEX, *MOVED_ONLY)

ARITHMETIC = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

# One element; fewer than a vector; around the heap's, the direct way's and the stage's limits in bytes of float32;
# several stages, with a rest.
SIZES = (0, 1, 3, 1000, 1024, 1025, 4096, 4097, 16384, 16385, 32767, 32768, 32769, 100_003)


def tensor_of(rank: int, size: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rank `rank`'s values: bytes that depend on rank and place, of the whole range of integers."""
    shape = (size,) if isinstance(size, int) else size
    count = int(np.prod(shape, dtype=np.int64))
    bits = np.random.default_rng([rank, count]).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype == torch.bool:
        return torch.from_numpy(bits % 2 == 1).view(shape)
    if dtype.is_floating_point or dtype.is_complex:
        numbers = torch.from_numpy(bits.astype(np.float32) / 64 - 2 + np.float32(rank) / 3)
        if dtype.is_complex:
            return torch.complex(numbers[:count].double(), numbers[-count:].double()).to(dtype).view(shape)
        return numbers[:count].to(dtype).view(shape)
    return torch.from_numpy(bits).view(dtype).view(shape)


def reduced(tensors: list[torch.Tensor], op: object) -> torch.Tensor:
    """What torch and numpy make of the tensors, in the order of the ranks: integers wrap, halves add up in float32."""
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        kind = {ReduceOp.SUM: "or", ReduceOp.MAX: "or", ReduceOp.BOR: "or", ReduceOp.BXOR: "xor"}.get(op, "and")
        return functools.reduce(getattr(torch, f"logical_{kind}"), tensors)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.from_numpy(_reduced_integers([t.numpy() for t in tensors], op))
    wide = [t.float() if dtype in HALVES else t for t in tensors]
    if dtype.is_complex and op != ReduceOp.PRODUCT:  # by parts
        return torch.view_as_complex(reduced([torch.view_as_real(t) for t in tensors], op))
    if op == ReduceOp.AVG:
        return (functools.reduce(operator.add, wide) / len(wide)).to(dtype)
    combine = {
        ReduceOp.SUM: operator.add,
        ReduceOp.PRODUCT: operator.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
    }
    return functools.reduce(combine[op], wide).to(dtype)


def _reduced_integers(arrays: list[np.ndarray], op: object) -> np.ndarray:
    if op == ReduceOp.AVG:  # exactly, towards zero, in Python's integers; a sum that leaves 64 bits is not asked for
        sums = functools.reduce(operator.add, [a.astype(object) for a in arrays])
        means = [abs(s) // len(arrays) * (1 if s >= 0 else -1) for s in sums.ravel()]
        return np.array(means, dtype=object).astype(arrays[0].dtype).reshape(arrays[0].shape)
    combine = {
        ReduceOp.SUM: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.BAND: np.bitwise_and,
        ReduceOp.BOR: np.bitwise_or,
        ReduceOp.BXOR: np.bitwise_xor,
    }
    return functools.reduce(combine[op], arrays)


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's memory in order: equal for tensors that are the same bit for bit."""
    return tensor.detach().reshape(-1).clone().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Bitwise."""
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    assert bits(found) == bits(expected), (what, found.reshape(-1)[:8], expected.reshape(-1)[:8])
