"""A `Permutation` is an indexable shuffle: it computes the index at any position, without the rest of the order.

It is a Feistel network over pairs. An index x of [0, n) is written as (l, r) with x = l + a r, for a even and a b >= n:

    round 1:  l <- (l + F1(r)) mod a        l             r
    round 2:  r <- (r + F2(l)) mod b        + <-- F1 ---- |
    round 3:  l <- (l + F3(r)) mod a        | --- F2 ---> +
    ...                                     + <-- F3 ---- |

Every round is invertible for any F, so the network permutes [0, a b). A result of n or more is encrypted again until it
is below n ("cycle walking"), which makes it a permutation of [0, n). Fewer than one in b results need this.

Source: Black and Rogaway (2002), Ciphers with arbitrary finite domains, sections 4 and 5; the use of such a cipher to
shuffle is from Mitchell, Stokes, Frank and Holmes (2022), Bandwidth-optimal random shuffling for GPUs.
"""

from __future__ import annotations

import hashlib
import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.uint64]

# Six rounds mix a large domain: from four on, tests/data/test_permutation.py detects no structure. In a small domain,
# each F has few values, so more rounds are needed until all orders are equally likely (checked for up to 7 samples: 12
# rounds are too few, 16 are enough); there, rounds cost little.
ROUNDS = 6
SMALL_ROUNDS = 24
SMALL = 4096

_HALF = np.uint64(32)
# From the finalisers of MurmurHash3 and of SplitMix64: odd, with about half of their bits set.
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xBF58476D1CE4E5B9)


class Permutation:
    """`Permutation` is a pseudorandom permutation of [0, length), the same for `length` and `key` on every machine.

    Cost: no memory that grows with `length`; about 50 ns per index in a batch of thousands. It is not cryptographically
    secure: the rounds use a fast hash, and a part of the order reveals the rest.

    Raises:
        ValueError: `length` is negative or above 2**63 - 1.
    """

    def __init__(self, length: int, key: str) -> None:
        if not 0 <= length < 2**63:
            raise ValueError(f"length must be from 0 to 2**63 - 1, got {length}")
        self.length = length
        self.key = key
        # a is near the root of n, and even: with a and b odd, every round is an even permutation, and only half of all
        # orders are possible. Both stay below 2**32, so that a 32-bit hash times a or b fits into 64 bits.
        a = max(2, (math.isqrt(max(length - 1, 0)) + 2) // 2 * 2)
        self._a = np.uint64(a)
        self._b = np.uint64(max(1, -(-length // a)))
        self._round_keys = _derive_round_keys(key, SMALL_ROUNDS if length < SMALL else ROUNDS)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> int:
        """Return the index at `position` of the shuffled order; negative positions count from its end."""
        if not -self.length <= position < self.length:
            raise IndexError(f"position {position} is outside a permutation of length {self.length}")
        return int(self.take(np.array([position % self.length], dtype=np.uint64))[0])

    def take(self, positions: Indices) -> Indices:
        """Return the indices at `positions`, an array of any shape whose values are all below `length`."""
        indices = _encrypt(positions, self._a, self._b, self._round_keys)
        outside = indices >= self.length
        while outside.any():
            indices[outside] = _encrypt(indices[outside], self._a, self._b, self._round_keys)
            outside = indices >= self.length
        return indices


class WindowPermutations:
    """`WindowPermutations` is a pseudorandom permutation of each of many short ranges, the numbered windows.

    Cost: no memory; about 300 ns per index, for any number of windows.
    """

    def __init__(self, key: str) -> None:
        self._round_keys = _derive_round_keys(key, SMALL_ROUNDS)

    def take(self, positions: Indices, lengths: Indices, windows: Indices) -> Indices:
        """Return the permuted positions; each position, before and after, is below the length of its window.

        Shape: all arguments and the result (n).
        """
        a = np.maximum(2, (np.sqrt(np.maximum(lengths, 1) - 1).astype(np.uint64) + np.uint64(2)) & ~np.uint64(1))
        b = np.maximum(1, -(-lengths.astype(np.int64) // a.astype(np.int64))).astype(np.uint64)
        tweaks = _mix(windows)
        indices = _encrypt(positions, a, b, self._round_keys, tweaks)
        while (outside := np.flatnonzero(indices >= lengths)).size:
            indices[outside] = _encrypt(indices[outside], a[outside], b[outside], self._round_keys, tweaks[outside])
        return indices


def _mix(numbers: Indices) -> Indices:
    """Return a hash of each number; consecutive numbers have unrelated hashes."""
    mixed: Indices = (numbers + np.uint64(1)) * _MIX_1
    mixed ^= mixed >> _HALF
    mixed *= _MIX_2
    mixed ^= mixed >> _HALF
    return mixed


def _encrypt(
    x: Indices,
    a: np.uint64 | Indices,
    b: np.uint64 | Indices,
    round_keys: list[np.uint64],
    tweaks: Indices | None = None,
) -> Indices:
    """Return x after one pass through the network, on [0, a b); arithmetic is modulo 2**64 throughout.

    If `a`, `b` and `tweaks` are arrays, they have a value for each x; each tweak selects another permutation.
    """
    moving_size, fixed_size = a, b
    fixed: Indices = x // a
    moving: Indices = x - fixed * a
    h = np.empty_like(x)
    wrapped = np.empty_like(x)
    for round_key in round_keys:
        np.add(fixed, round_key, out=h)
        if tweaks is not None:
            h += tweaks
        h *= _MIX_1
        np.right_shift(h, _HALF, out=wrapped)
        h ^= wrapped
        h *= _MIX_2
        h >>= _HALF
        h *= moving_size  # a hash of 32 bits, scaled to [0, moving_size)
        h >>= _HALF
        moving += h
        np.subtract(moving, moving_size, out=wrapped)  # a difference below zero wraps around to a huge number
        np.minimum(moving, wrapped, out=moving)
        moving, fixed = fixed, moving
        moving_size, fixed_size = fixed_size, moving_size
    fixed *= a
    moving += fixed  # after an even number of rounds, each half is back in its place
    return moving


def _derive_round_keys(key: str, rounds: int) -> list[np.uint64]:
    """Return `rounds` independent words of 64 bits; similar keys give unrelated words."""
    stream = hashlib.shake_128(key.encode()).digest(8 * rounds)
    return [np.uint64(word) for word in np.frombuffer(stream, dtype="<u8")]
