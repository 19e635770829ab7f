"""What the size of a group decides, and the symmetric memory of one rank in this process."""

import ctypes
import os
import resource
from dataclasses import replace

import pytest

from phalanx import _core
from phalanx._base.core_numbers import CLOSED
from phalanx._base.deadline import Deadline
from phalanx._base.ipc.local_listener import LocalAddress, new_token
from phalanx._comm.symmetric_memory.fd_server import FdServer
from phalanx._comm.symmetric_memory.memory import (
    LocalRank,
    channel_bytes,
    decide_heap_bytes,
    heap_bytes,
    is_oversubscribed,
    open_as_leader,
    open_as_member,
)
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx.errors import ClosedError, DeadlineError, PhalanxError

ME = ProcessId.of_self()


def members(*cpus):
    return [LocalRank(ME, frozenset(c)) for c in cpus]


def test_a_group_is_oversubscribed_when_it_has_fewer_cores_than_ranks():
    assert not is_oversubscribed(members({0, 1}, {0, 1}))
    assert not is_oversubscribed(members({0}, {1}))
    assert is_oversubscribed(members({0}, {0}))
    assert is_oversubscribed(members({0, 1}, {0, 1}, {0, 1}))
    assert is_oversubscribed([replace(member, threads=2) for member in members({0, 1}, {0, 1})])
    assert not is_oversubscribed([replace(member, threads=2) for member in members({0, 1}, {2, 3})])


def test_rings_are_powers_of_two_that_shrink_as_their_number_grows():
    sizes = [channel_bytes(n) for n in (1, 8, 9, 32, 33, 1024)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size & (size - 1) == 0 and size >= _core.PAGE for size in sizes)
    assert _core.group_bytes(64, 131072, channel_bytes(64)) < 1 << 28


def test_a_heap_is_as_large_as_the_memory_of_the_machine():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total <= heap_bytes(2) < total + (1 << 30)


def test_a_heap_stays_within_the_limits_of_the_process() -> None:
    # ftruncate beyond `ulimit -f` ends a process with SIGXFSZ, and a user with such a limit could not train at all.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, before[1]))
    try:
        assert heap_bytes(2) == 1 << 28
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def symm_mem():
    token = new_token()
    with FdServer(token) as server:
        symm_mem = open_as_leader(server, members({0}), Deadline.after(10), lambda missing: None, lambda waited_s: None)
    yield symm_mem
    symm_mem.close()


def test_the_core_refuses_memory_of_another_kind_and_sizes_without_sense(symm_mem):
    with pytest.raises(ValueError, match="not written by this version of Phalanx"):
        _core.Group(symm_mem._control, 100, 0, 0, 0, (-1,), (-1,), None)
    with pytest.raises(ValueError, match="not for this group"):
        _core.Group(symm_mem._control, symm_mem._control_bytes, 1, 0, 0, (-1,), (-1,), None)
    assert _core.group_bytes(0, 131072, 4096) == 0
    assert _core.group_bytes(2, 131072, 5000) == 0
    with pytest.raises(ValueError, match="1 to 1024 ranks"):
        _core.format(symm_mem._control, 2000, 131072, 4096, 0)


def test_blocks_are_zeroed_let_go_with_their_buffer_and_used_anew(symm_mem):
    def check(status):
        assert status == 0

    def allocate(nbytes):
        return symm_mem.allocate(nbytes, Deadline.after(10), 0, check)

    first, second = allocate(5000), allocate(1)
    assert (len(first), ctypes.addressof(second) - ctypes.addressof(first)) == (5000, 8192)
    at = ctypes.addressof(first)
    first[:3] = b"abc"
    del first
    buffer = allocate(5000)
    assert ctypes.addressof(buffer) == at
    assert buffer[:3] == b"\0\0\0"
    with pytest.raises(PhalanxError, match="is full"):
        allocate(1 << 60)
    symm_mem.close()
    buffer[:3] = b"abc"  # still ours
    assert symm_mem.closed
    with pytest.raises(ClosedError):
        allocate(1)


def test_a_closed_core_refuses_calls_instead_of_touching_memory_that_is_gone(symm_mem):
    core = symm_mem.core
    symm_mem.close()
    symm_mem.close()  # again: nothing happens
    assert core.barrier(1, 0, ()) == CLOSED
    with pytest.raises(ClosedError, match="destroyed"):
        core.state(0)
    with pytest.raises(ClosedError, match="destroyed"):
        core.records(0)


def test_why_a_group_is_over_is_said_once_and_whole_or_not_at_all(symm_mem):
    core = symm_mem.core
    assert core.failure() == ""
    assert not core.set_failure("x" * 3072)
    assert core.failure() == ""
    longest = "x" * 3071
    assert core.set_failure(longest)
    assert core.set_failure("another")
    assert core.failure() == longest


def test_everything_a_closed_core_can_be_asked_is_refused(symm_mem):
    core = symm_mem.core
    symm_mem.close()
    for ask in (
        *(lambda: core.poison(), lambda: core.set_poison(2, 0), lambda: core.set_exit_reason("x")),
        *(lambda: core.failure(), lambda: core.set_failure("x")),
    ):
        with pytest.raises(ClosedError, match="destroyed"):
            ask()
    with pytest.raises(ClosedError, match="destroyed"):
        core.add_call_site("x")


def test_members_that_never_fetch_the_memory_are_named_and_nothing_is_kept():
    before = len(os.listdir("/proc/self/fd"))
    with FdServer(new_token()) as server, pytest.raises(DeadlineError) as caught:
        open_as_leader(server, members({0}, {1}), Deadline.after(0.1), lambda missing: None, lambda waited_s: None)
    assert caught.value.missing == (1,)
    with pytest.raises(PhalanxError, match="cannot be reached"):
        open_as_member(
            LocalAddress(new_token(), "/proc/self/fd/1000000"),
            1,
            members({0}, {1}),
            Deadline.after(1),
            lambda waited_s: None,
        )
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_heaps_of_all_ranks_together_fit_into_the_addresses_of_a_process():
    """Each was as large as the machine's memory: 192 ranks on 768 GiB needed 147 TB of 128 TiB, in every process."""
    gib = 1 << 30
    for ranks in (1, 2, 8, 96, 192, 384, 1024):
        for memory in (gib // 2, 16 * gib, 768 * gib, 4096 * gib):
            heap = decide_heap_bytes(ranks, memory, [])
            assert heap % _core.PAGE == 0
            assert heap * ranks <= max(1 << 42, 2 * memory + ranks * gib)
            assert heap >= min(memory, 1 << 40, memory * 2 // ranks) // _core.PAGE * _core.PAGE  # twice a fair share
    assert decide_heap_bytes(192, 768 * gib, []) * 192 <= 1 << 42
    assert decide_heap_bytes(8, 64 * gib, []) == 64 * gib
    assert decide_heap_bytes(8, 64 * gib, [gib]) == gib // 16
    assert decide_heap_bytes(1024, 64 * gib, [0]) == _core.PAGE
