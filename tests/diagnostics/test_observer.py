"""A group's memory can be read from outside, whatever its ranks do, and reading leaves no trace."""

import os
from contextlib import closing

import pytest

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.agent import listen
from phalanx._base.ipc.channel import Channel
from phalanx._base.ipc.local_listener import new_token
from phalanx._comm.diagnostics import observer
from phalanx._comm.diagnostics.observer import GroupInfo, Observer, register_group
from phalanx._comm.symmetric_memory.fd_server import FdServer
from phalanx._comm.symmetric_memory.memfd import memory
from phalanx._comm.symmetric_memory.memory import LocalRank, open_as_leader
from phalanx._comm.symmetric_memory.watch import ProcessId

HOUR_NS = 3_600_000_000_000


@pytest.fixture
def seen():
    """A group of one rank, and the descriptor that its creation showed."""
    fds = []
    members = [LocalRank(ProcessId.of_self(), frozenset({0}))]
    with FdServer(new_token()) as server:
        symm_mem = open_as_leader(
            server,
            members,
            Deadline.after(10),
            lambda missing: None,
            lambda waited_s: None,
            register=lambda fd: fds.append(os.dup(fd)),
        )
    group_info = GroupInfo("dp", 1, (3,), (os.getpid(),))
    looker = Observer(group_info, fds[0])
    yield symm_mem, looker
    symm_mem.close()
    looker.close()


def test_what_a_rank_did_is_read_from_outside_also_after_it_left(seen):
    symm_mem, looker = seen
    assert looker.read().ranks[0].records == ()
    call_site = symm_mem.core.add_call_site("train.py:88")
    assert symm_mem.core.barrier(HOUR_NS, call_site, ()) == 0  # number 0, where all meet; it is not shown
    assert symm_mem.core.barrier(HOUR_NS, call_site, ()) == 0
    rank = looker.read().ranks[0]
    assert (rank.rank, rank.came, rank.left) == (3, True, False)
    assert rank.records[-1].place == "barrier #1 (train.py:88)"
    assert not looker.is_over()
    symm_mem.core.set_exit_reason("done")
    symm_mem.close()
    after = looker.read()
    assert looker.is_over()
    assert (after.ranks[0].exit_reason, after.ranks[0].records) == ("done", rank.records)


def test_reading_writes_nothing(seen):
    _, looker = seen
    size = os.fstat(looker.control).st_size
    before = os.pread(looker.control, size, 0)
    looker.read()
    assert os.pread(looker.control, size, 0) == before


def test_peers_are_told_by_their_numbers_in_the_job(seen):
    symm_mem, looker = seen
    assert symm_mem.core.barrier(HOUR_NS, 0, ()) == 0
    assert symm_mem.core.broadcast(0, 0, 0, 0, HOUR_NS, 0, (0,)) == 0
    assert looker.read().ranks[0].records[-1].root == 3


def test_memory_that_is_something_else_is_refused():
    with memory("other", 1 << 16) as fd, pytest.raises(ValueError, match="not written by this version"):
        Observer(GroupInfo("dp", 1, (0,), (1,)), fd)
    with memory("empty", 0) as fd, pytest.raises((ValueError, OSError)):
        Observer(GroupInfo("dp", 1, (0,), (1,)), fd)


@pytest.mark.parametrize("offset", [12, 16, 24, 32, 40, 48, 56, 64])
def test_a_description_that_a_rank_has_written_over_is_refused(seen, offset):
    _, looker = seen
    before = os.pread(looker.control, 8, offset)
    os.pwrite(looker.control, b"\xff\x7f\xff\x7f", offset)
    with pytest.raises(ValueError, match="not written by this version"):
        looker.read()
    os.pwrite(looker.control, before, offset)
    assert looker.read().ranks[0].came


def test_showing_hands_over_the_descriptor_and_the_group_info():
    name = f"phalanx-test-{os.getpid()}"
    with listen(name, 1) as listener, memory("control", 4096) as fd:
        os.pwrite(fd, b"hello", 0)
        assert register_group(f"{name}:secret", GroupInfo("dp", 2, (0, 1), (7, 8)), fd)
        with closing(Channel(listener.accept()[0])) as channel:
            (message,) = channel.receive_available()
        group = {"name": "dp", "world_size": 2, "ranks": [0, 1], "pids": [7, 8]}
        assert message.content == {"kind": "group", "token": "secret", **group}
        assert os.pread(message.fds[0], 5, 0) == b"hello"
        message.close()


@pytest.mark.parametrize("agent", ["phalanx-nobody:secret", "x", "y" * 300 + ":z"])
def test_an_agent_that_is_not_there_costs_nothing(agent):
    with memory("control", 4096) as fd:
        assert not observer.register_group(agent, GroupInfo("dp", 1, (0,), (1,)), fd)
