"""Under a seccomp profile without the calls that shared memory wants: fall back where one can, and say so."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.backend.default_group import join_by_file
from tests.containers import contained, why_no_containers
from tests.leaks import files_in_shm
from tests.logs import logged
from tests.seccomp import UNIX_SOCKETS, forbid, why_no_seccomp

import phalanx
from phalanx.errors import PeerLostError, PhalanxError
from phalanx.testing import run_ranks

pytestmark = pytest.mark.skipif(bool(why_no_seccomp()), reason=why_no_seccomp())
needs_containers = pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers())


def train(rank, world_size):
    """Every way in which memory is used: messages, collectives, tensors in symmetric memory, a second group."""
    total = torch.full((5,), float(rank + 1))
    dist.all_reduce(total)
    shared = phalanx.shared_empty(1000).fill_(rank + 1.0)
    dist.all_reduce(shared)
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(total, group=pair)
    return total[0].item(), shared[7].item(), type(dist.group.WORLD.transport).__name__


def _run(rank, world_size, path, forbidden):
    forbid(*forbidden.get(rank, ()))
    with logged() as lines:
        join_by_file(rank, world_size, path)
        return (*train(rank, world_size), lines)


def _results(tmp_path, world_size, forbidden):
    results = run_ranks(_run, world_size, str(tmp_path / "store"), forbidden, init=False)
    total = world_size * (world_size + 1) / 2
    assert [result[:2] for result in results] == [(2 * total if r < 2 else total, total) for r in range(world_size)]
    return [result[2] for result in results], [result[3] for result in results]


def test_without_memfd_the_memory_is_an_unlinked_file_and_the_first_rank_says_so_once(tmp_path) -> None:
    before = files_in_shm()
    groups, lines = _results(tmp_path, 3, {r: ("memfd_create",) for r in range(3)})
    assert groups == ["SharedMemoryTransport"] * 3
    said = "shared memory is in unnamed files in /dev/shm, because memfd_create: Operation not permitted"
    assert lines == [[said], [], []]
    assert files_in_shm() == before


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_without_pidfds_all_goes_on(tmp_path, ranks) -> None:
    groups, lines = _results(tmp_path, 2, dict.fromkeys(ranks, ("pidfd_open",)))
    assert groups == ["SharedMemoryTransport"] * 2
    assert lines == [[], []]


def test_without_unix_sockets_on_one_rank_all_use_gloo_and_each_says_so_once(tmp_path) -> None:
    groups, lines = _results(tmp_path, 2, {1: (UNIX_SOCKETS,)})
    assert groups == ["GlooTransport"] * 2
    for rank in lines:
        assert rank[0] == (
            "backend 'phalanx': on rank 1 Unix sockets are not available (Operation not permitted); "
            "using Gloo for group '0'"
        )


def _lost(rank, world_size, path, forbidden):
    forbid(*forbidden)
    join_by_file(rank, world_size, path)
    dist.barrier()
    if rank == 1:
        os._exit(3)
    begin = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        dist.all_reduce(torch.ones(3))
    return caught.value.ranks, str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("forbidden", [("pidfd_open",), ("pidfd_open", "memfd_create")])
def test_without_pidfds_a_death_is_heard_as_fast_as_with_them(tmp_path, forbidden) -> None:
    results = run_ranks(_lost, 3, str(tmp_path / "store"), forbidden, init=False, lost=[1])
    for rank in (0, 2):
        ranks, message, seconds = results[rank]
        assert ranks == (1,)
        assert "rank 1 (pid " in message
        assert seconds < 10  # the deadline is 20 s: it was not that


def _with_a_child(rank, world_size, path):
    """A DataLoader worker that outlives its rank must not keep it alive in the eyes of others."""
    forbid("pidfd_open")
    join_by_file(rank, world_size, path)
    dist.barrier()
    if rank == 1:
        if os.fork() == 0:
            time.sleep(100)
        os._exit(3)
    with pytest.raises(PeerLostError):
        dist.barrier()


def test_a_child_of_a_dead_rank_does_not_keep_it_alive(tmp_path) -> None:
    assert run_ranks(_with_a_child, 2, str(tmp_path / "store"), init=False, lost=[1]) == [None, None]


def _in_little_room(rank, world_size, path):
    def use():
        forbid("memfd_create")
        join_by_file(rank, world_size, path)
        total = torch.ones(3)
        dist.all_reduce(total)
        with pytest.raises(PhalanxError) as caught:
            phalanx.shared_empty(1 << 22)
        dist.all_reduce(phalanx.shared_empty(100).fill_(1.0))  # the group goes on
        dist.all_reduce(total)
        return total[0].item(), str(caught.value)

    return contained(use, namespaces=(), shm_bytes=8 << 20)


@needs_containers
def test_a_tensor_for_which_the_file_system_has_no_room_is_an_error_on_all_ranks_and_the_group_goes_on(
    tmp_path,
) -> None:
    for total, message in run_ranks(_in_little_room, 2, str(tmp_path / "store"), init=False):
        assert total == 4
        assert message == (
            f"shared_empty of {1 << 24} bytes: the file system that holds the group's memory is full.\n"
            "Free space there, or allow memfd_create (a seccomp profile forbids it), which needs no file system."
        )
