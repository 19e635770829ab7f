"""What ranks tell each other of where Gloo listens comes whole, together, and in few requests."""

from __future__ import annotations

import random
import struct
from datetime import timedelta

import pytest
import torch
from tests.engines.gloo_engines import WAIT, engine_of
from tests.threads import map_in_threads
from torch.distributed import DistStoreError, HashStore, PrefixStore

from phalanx._comm.engines.gloo import GlooAddresses, compress, decompress
from phalanx.testing import run_ranks


class Counted:
    """A store that counts what it is asked."""

    def __init__(self, store):
        self._store = store
        self.counts = {}

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def call(*arguments):
            self.counts[name] = self.counts.get(name, 0) + 1
            return method(*arguments)

        return call


@pytest.mark.parametrize("seed", range(20))
def test_what_was_compressed_comes_back(seed):
    rng = random.Random(seed)
    rows = b"".join(
        struct.pack(f"<{n}Q", *((start + step * k) % (1 << 64) for k in range(n)))
        for n, start, step in ((rng.randrange(50), rng.randrange(1 << 64), rng.choice([0, 1, 7, -3])) for _ in range(4))
    )
    data = rng.randbytes(rng.randrange(40)) + rows + rng.randbytes(rng.randrange(9))
    assert decompress(compress(data)) == data


def test_a_row_of_numbers_takes_the_same_room_however_long_it_is():
    def row(n):
        return compress(b"\2" + bytes(7) + b"hostname" + struct.pack(f"<{n}Q", *range(77, 77 + n)))

    assert len(row(8000)) == len(row(10)) < 60


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_rank_finds_all_others_with_a_number_of_requests_that_does_not_grow(size):
    shared = HashStore()
    stores = [Counted(PrefixStore("group", shared)) for _ in range(size)]
    found = {}

    def meet(rank):
        mine = GlooAddresses(stores[rank], rank, size)
        assert not mine.check(["0/0"])
        mine.set(f"0/{rank}", bytes([rank]) * (100 + rank))
        mine.wait([f"0/{other}" for other in range(size)], timedelta(seconds=60))
        assert mine.check([f"0/{other}" for other in range(size)])
        assert not mine.check(["1/0"])
        found[rank] = [mine.get(f"0/{other}") for other in range(size)]

    map_in_threads(meet, reversed(range(size)))
    assert found == {rank: [bytes([other]) * (100 + other) for other in range(size)] for rank in range(size)}
    for rank, store in enumerate(stores):
        assert sum(store.counts.values()) == (5 if rank == 0 else 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_waited_for_as_long_as_was_said(rank):
    mine = GlooAddresses(HashStore(), rank, 2)
    mine.set(f"0/{rank}", b"x")
    with pytest.raises(DistStoreError):
        mine.wait(["0/0", "0/1"], timedelta(milliseconds=20))


def test_engines_that_were_built_over_one_store_one_after_another_do_not_mix():
    def check(rank, world_size):
        sums = []
        for number in range(3):
            engine = engine_of(rank, world_size, f"group {number}")
            mine, other = torch.tensor([float(rank + number)]), torch.empty(1)
            for one in [engine.send(1 - rank, mine, 5), engine.recv(1 - rank, other, 5)]:
                one.wait(WAIT)
            sums.append(other.item())
            engine.close()
            engine.free()
        return sums

    assert run_ranks(check, 2) == [[1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]
