"""A rank that is killed, whenever, changes nothing of the result: the others do its part."""

import operator
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.errors import PeerLostError
from phalanx.mapreduce import map_reduce, survivors
from phalanx.testing import run_ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = random.Random(2)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(" ".join(f"w{int(rng.expovariate(0.01))}" for _ in range(6)) for _ in range(3000)))
    return path


def struck(rank, world_size, path, victims, gather):
    """Word count, in which each of `victims` (rank -> number of a call of its functions) kills itself."""
    calls = 0

    def strike():
        nonlocal calls
        calls += 1
        if calls == victims.get(rank):
            os.kill(os.getpid(), signal.SIGKILL)

    def count(line):
        strike()
        for word in line.split():
            yield word, 1

    def add_up(word, counts):
        strike()
        return sum(counts)

    result = map_reduce(
        path, count, add_up, combine=operator.add, gather=gather, split_bytes=4000, partitions=8, memory_bytes=1 << 20
    )
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)  # it was not struck: its share was small
    return dict(result), result.lost, 1 if result.group is None else result.group.size()


@pytest.mark.slow(but=("gloo",))
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_the_others_do_what_a_killed_rank_has_done_and_would_have(text, backend, pytestconfig):
    """The first call of all, in the middle of map, at the end of map, in reduce; then at random."""
    want = Counter(text.read_text().split())
    rng = random.Random(backend)
    strikes = pytestconfig.getoption("mapreduce_kills")
    at = [1, 400, 1000, 1100] + [rng.randrange(1, 1500) for _ in range(strikes - 4)]
    for number in range(strikes):
        world_size = 2 + number % 3
        victim = rng.randrange(world_size)
        ranks = run_ranks(struck, world_size, text, {victim: at[number]}, True, backend=backend, lost=(victim,))
        for rank, told in enumerate(ranks):
            if rank != victim:
                assert told[0] == want, (world_size, victim, at[number])
                assert told[1:] in (((victim,), world_size - 1), ((), world_size))


def keeper_is_killed(rank, world_size, folder):
    """Rank 0 keeps the store, and is killed in its first record."""
    place = Path(folder, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        place.with_suffix(".new").write_text(str(store.port))
        place.with_suffix(".new").rename(place)
    else:
        until = time.monotonic() + 40
        while not place.exists():
            assert time.monotonic() < until
            time.sleep(0.001)
        store = dist.TCPStore("127.0.0.1", int(place.read_text()), world_size, is_master=False)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size)

    def strike(number):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return [(number, 1)]

    def add_up(key, values):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # the others had done it all
        return sum(values)

    try:
        map_reduce(range(100), strike, add_up)
    except PeerLostError as error:
        return str(error)
    return ""


def test_without_the_store_nobody_goes_on_and_all_say_why(tmp_path):
    ranks = run_ranks(keeper_is_killed, 3, tmp_path, init=False, lost=(0,))
    for text in ranks[1:]:
        assert "the store of the group has ended, probably with the rank that keeps it" in text


def test_two_ranks_of_four_may_be_killed_and_each_partition_is_still_somewhere(text):
    want = Counter(text.read_text().split())
    for victims in ({0: 1, 3: 1}, {1: 20, 2: 60}):  # few: however little of the map a rank gets
        ranks = run_ranks(struck, 4, text, victims, False, lost=tuple(victims))
        left = [told for told in ranks if told is not None]
        assert len(left) == 2
        assert [told[1:] for told in left] == [(tuple(victims), 2)] * 2
        assert sum(len(told[0]) for told in left) == len(want)
        assert {**left[0][0], **left[1][0]} == want


def lost_while_meeting(rank, world_size):
    """Rank 1 is killed in its first record, rank 2 when the others form their group without it."""

    def strike(number):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return [(number % 9, 1)]

    def add_up(key, values):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return sum(values)

    if rank == 2:
        survivors.Survivors._meet = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    result = map_reduce(range(90), strike, add_up, gather=True)
    return dict(result), result.lost


def test_a_rank_that_is_lost_while_the_others_meet_is_gone_without_as_well():
    """What the backend names in the group that was to be was taken for numbers of the first group."""
    ranks = run_ranks(lost_while_meeting, 4, lost=(1, 2))
    assert ranks == [({key: 10 for key in range(9)}, (1, 2)), None, None, ({key: 10 for key in range(9)}, (1, 2))]
