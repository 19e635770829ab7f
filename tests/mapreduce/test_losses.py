"""A rank that is killed ends the call on the others, who are told which it was."""

import operator
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.errors import PeerLostError
from phalanx.mapreduce import map_reduce
from phalanx.testing import run_ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = random.Random(2)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(" ".join(f"w{int(rng.expovariate(0.01))}" for _ in range(6)) for _ in range(3000)))
    return path


def struck(rank, world_size, path, at):
    """Count words; rank 1 kills itself at a call of its functions. Return the ranks that the error names as lost."""
    calls = 0

    def strike():
        nonlocal calls
        calls += 1
        if rank == 1 and calls == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def count(line):
        strike()
        for word in line.split():
            yield word, 1

    def add_up(word, counts):
        strike()
        return sum(counts)

    try:
        map_reduce(path, count, add_up, combine=operator.add, gather=True, split_bytes=4000, partitions=8)
    except PeerLostError as error:
        return [lost for lost in error.ranks if f"{lost} (pid " in str(error)]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # it was not struck: its share was small
    return [1]


@pytest.mark.slow(but=("1-phalanx",))
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@pytest.mark.parametrize("at", [1, 400])
def test_a_lost_rank_is_told_to_the_others(text, backend, at):
    for told in run_ranks(struck, 3, text, at, backend=backend, lost=(1,))[::2]:
        assert 1 in told, told  # the third rank may have ended, too, by then


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
        assert "the store of the group has closed, probably with its host rank" in text
