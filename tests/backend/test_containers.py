"""Ranks in containers of one machine: other process numbers, other networks, other users, other names."""

import ctypes
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from tests.backend.default_group import join_by_file
from tests.containers import contained, why_no_containers

from phalanx._comm.rendezvous.rank_info import host_identity
from phalanx.errors import PeerLostError, PhalanxError
from phalanx.testing import RankFailed, run_ranks

pytestmark = pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers())

_CLONE_NEWUTS = 0x04000000


def total(rank, world_size, path):
    join_by_file(rank, world_size, path)
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor)
    group = dist.group.WORLD
    return tensor[0].item(), os.getpid(), group.shares_memory


def _spread(rank, world_size, path, namespaces):
    mine = namespaces[rank]
    return contained(total, rank, world_size, path, namespaces=mine) if mine else total(rank, world_size, path)


@pytest.mark.parametrize("namespaces", [[("pid",), ("pid",)], [("pid",), ()], [(), ("pid",), ("pid",)]])
def test_ranks_in_other_pid_namespaces_share_memory(tmp_path, namespaces) -> None:
    size = len(namespaces)
    results = run_ranks(_spread, size, str(tmp_path / "store"), namespaces, init=False)
    assert [r[0] for r in results] == [size * (size + 1) / 2] * size
    assert all(r[2] for r in results)
    assert [r[1] == 1 for r in results] == [bool(mine) for mine in namespaces]


def test_ranks_in_other_user_namespaces_are_on_other_hosts(tmp_path) -> None:
    # Each is root in its own, and another user to the other, whose socket closed its connection unread.
    results = run_ranks(_spread, 2, str(tmp_path / "store"), [("user",), ("user",)], init=False)
    assert [r[0] for r in results] == [3.0, 3.0]
    assert not any(r[2] for r in results)


def _lost(rank, world_size, path, namespaces):
    def run():
        join_by_file(rank, world_size, path)
        dist.barrier()
        if rank == 1:
            os._exit(3)
        with pytest.raises(PeerLostError) as caught:
            dist.all_reduce(torch.ones(3))
        return caught.value.ranks, str(caught.value)

    return contained(run, namespaces=namespaces[rank]) if namespaces[rank] else run()


@pytest.mark.parametrize("namespaces", [[("pid",), ("pid",), ("pid",)], [(), ("pid",), ()]])
def test_a_death_in_another_pid_namespace_is_heard(tmp_path, namespaces) -> None:
    # Before there were pipes for it, it was found by the deadline, half an hour later by default.
    results = run_ranks(_lost, 3, str(tmp_path / "store"), namespaces, init=False, lost=[1])
    for rank in (0, 2):
        ranks, message = results[rank]
        assert ranks == (1,)
        assert "rank 1 (pid 1 in another pid namespace) is gone: it ended without notice" in message


def _cut_off(rank, world_size, path):
    return contained(join_by_file, rank, world_size, path, 3.0, namespaces=("net",))


def test_ranks_whose_networks_are_apart_say_which_hosts_cannot_reach_each_other(tmp_path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_cut_off, 2, str(tmp_path / "store"), init=False)
    for rank in (0, 1):
        error = caught.value.errors[rank]
        assert isinstance(error, PhalanxError)
        assert f"group '0' on rank {rank}: the ranks' hosts cannot all reach each other.\n  rank 0: " in str(error)
        assert "Check that these addresses can be reached from each host" in str(error)


def _named(rank, world_size, path):
    libc = ctypes.CDLL(None, use_errno=True)
    name = f"node{rank}".encode()
    assert libc.unshare(_CLONE_NEWUTS) == 0
    assert libc.sethostname(name, len(name)) == 0
    return os.uname().nodename, host_identity(), total(rank, world_size, path)[2]


def test_one_host_of_two_names_is_one_host(tmp_path) -> None:
    first, second = run_ranks(_named, 2, str(tmp_path / "store"), init=False)
    assert (first[0], second[0]) == ("node0", "node1")
    assert first[1] == second[1] == host_identity()
    assert first[2]


def _identity(rank, world_size, namespaces, pipes):
    def look():
        found = os.uname().nodename, host_identity()
        os.write(pipes[1 - rank][1], b".")  # a namespace whose processes have ended gives its number to the next one
        os.read(pipes[rank][0], 1)
        return found

    return contained(look, namespaces=(namespaces,))


def _identities(namespace):
    pipes = [os.pipe(), os.pipe()]
    try:
        return run_ranks(_identity, 2, namespace, pipes, init=False)
    finally:
        for end in itertools.chain(*pipes):
            os.close(end)


@pytest.mark.parametrize("namespace", ["net", "user"])
def test_two_hosts_of_one_name_are_two_hosts(namespace) -> None:
    first, second = _identities(namespace)
    assert first[0] == second[0] == os.uname().nodename
    assert len({first[1], second[1], host_identity()}) == 3


def test_a_pid_namespace_makes_no_host() -> None:
    assert {identity for _, identity in _identities("pid")} == {host_identity()}
