"""Combine several datasets into one, with a fixed number of samples from each in every step.

    a: 10 samples, 4 in a step      b: 3 samples, 2 in a step

    unit          0        1        2        3        4      |   5       two samples of a, one of b: a step is two units
    of a        a0 a1    a2 a3    a4 a5    a6 a7    a8 a9    |  a' a'     an epoch is that of the largest dataset
    of b        b0       b1       b2       b'0      b'1      |  b'2       the others repeat, in a new order each time

Each unit has an index, so one number is the position in all datasets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.data.ordered import IndexOrder, OrderedDataset, epoch_key
from phalanx.data.permutation import Indices, Permutation


@dataclass(frozen=True)
class CombinedMember:
    """`CombinedMember` is one dataset, of which each step of all ranks together reads `batch_size` samples."""

    dataset: Any
    batch_size: int
    shuffle: bool
    seed: int
    collate_fn: Callable[[list[Any]], Any]
    drop_last: bool = False
    """Whether each of its batches must be full."""


class CombinedDataset(OrderedDataset):
    """`CombinedDataset` is a dataset of units: a unit has a list of samples from each of `members`, by name.

    `collate` turns the units of a DataLoader's batch into a dict with a batch of each member. If a member drops an
    incomplete last batch, an epoch has only complete steps: all batches are full.
    """

    def __init__(self, members: Mapping[str, CombinedMember]) -> None:
        self.members = dict(members)
        self.units_per_step = math.gcd(*(one.batch_size for one in self.members.values()))
        self._sizes = {name: one.batch_size // self.units_per_step for name, one in self.members.items()}
        lengths = {name: len(one.dataset) for name, one in self.members.items()}
        self.drop_last = any(one.drop_last for one in self.members.values())
        """Whether an epoch has only complete steps (none at all if no dataset has a full batch)."""
        self._lengths = lengths
        self._length = max(map(self._units_of, self.members))
        self._orders: dict[tuple[str, int], IndexOrder | None] = {}

    def _units_of(self, name: str) -> int:
        """Return the number of units that read this member once."""
        length = self._lengths[name]
        if self.drop_last:
            return length // self.members[name].batch_size * self.units_per_step
        return -(-length // self._sizes[name])

    def __len__(self) -> int:
        """Return the number of units of an epoch."""
        return self._length

    def __getitem__(self, index: int) -> dict[str, list[Any]]:
        """Return a unit by its number, which keeps counting from epoch to epoch."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, list[Any]]]:
        units: list[dict[str, list[Any]]] = [{} for _ in indices]
        for name in self.members:
            numbers = [self._numbers(name, index) for index in indices]
            samples = iter(self._read(name, [number for of_unit in numbers for number in of_unit]))
            for unit, of_unit in zip(units, numbers, strict=True):
                unit[name] = [next(samples) for _ in of_unit]
        return units

    def _numbers(self, name: str, index: int) -> list[tuple[int, int]]:
        """Return (epoch, position) of each sample of a member in a unit."""
        size, length = self._sizes[name], self._lengths[name]
        if self._units_of(name) == self._length:  # an epoch of this member is an epoch of all
            epoch, unit = divmod(index, self._length)
            return [(epoch, position) for position in range(unit * size, min((unit + 1) * size, length))]
        return [divmod(index * size + i, length) for i in range(size)]

    def _read(self, name: str, numbers: Sequence[tuple[int, int]]) -> list[Any]:
        member = self.members[name]
        indices: list[int] = [0] * len(numbers)
        for epoch in {epoch for epoch, _ in numbers}:
            places = [place for place, (of, _) in enumerate(numbers) if of == epoch]
            positions = np.array([numbers[place][1] for place in places], dtype=np.uint64)
            order = self._order_of(name, epoch)
            taken = (positions if order is None else order.take(positions)).tolist()
            for place, index in zip(places, taken, strict=True):
                indices[place] = index
        several = getattr(member.dataset, "__getitems__", None)
        return list(several(indices)) if several else [member.dataset[index] for index in indices]

    def _order_of(self, name: str, epoch: int) -> IndexOrder | None:
        if (name, epoch) not in self._orders:
            member = self.members[name]
            for old in [one for one in self._orders if one[0] == name and one[1] < epoch - 1]:
                del self._orders[old]
            if isinstance(member.dataset, OrderedDataset):
                self._orders[name, epoch] = member.dataset.order(member.seed, epoch, shuffle=member.shuffle)
            else:
                length = self._lengths[name]
                key = epoch_key(member.seed, epoch)
                self._orders[name, epoch] = Permutation(length, key) if member.shuffle else None
        return self._orders[name, epoch]

    def collate(self, units: Sequence[Mapping[str, list[Any]]]) -> dict[str, Any]:
        """Return the batch of each member by name."""
        return {
            name: member.collate_fn([sample for unit in units for sample in unit[name]])
            for name, member in self.members.items()
        }

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> IndexOrder:
        """Return the units of an epoch in order: each member has a shuffle of its own."""
        return _Units(epoch * self._length)

    def describe_order(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=8)
        for name, one in self.members.items():
            own = one.dataset.describe_order() if isinstance(one.dataset, OrderedDataset) else {}
            digest.update(repr((name, self._lengths[name], one.batch_size, one.shuffle, one.seed, own)).encode())
        if self.drop_last:
            digest.update(b"drop_last")
        return {"members": digest.hexdigest()}


class _Units:
    def __init__(self, first: int) -> None:
        self._first = np.uint64(first)

    def take(self, positions: Indices) -> Indices:
        indices: Indices = positions + self._first
        return indices
