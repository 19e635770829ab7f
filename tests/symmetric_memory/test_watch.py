"""Processes are watched through descriptors that a reused process number cannot fool."""

import ctypes
import dataclasses
import mmap
import os
import resource
import select
import signal
import subprocess
import sys

import pytest

from phalanx import _core
from phalanx._base.core_numbers import DEADLINE, PEER_LOST
from phalanx._base.processes import find_exit_status, read_start_ticks, read_stat
from phalanx._comm.symmetric_memory.memory import channel_bytes
from phalanx._comm.symmetric_memory.watch import Pidfds, ProcessId, can_watch_each_other, wait_status, watch
from phalanx.errors import PhalanxError


def a_child(program="input()"):
    return subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def identity_of(pid):
    return dataclasses.replace(ProcessId.of_self(), pid=pid, start_ticks=read_start_ticks(pid))


def is_over(fd):
    return bool(select.select([fd], [], [], 0)[0])


def test_a_watched_process_is_seen_to_end_whatever_ends_it():
    with a_child() as child:
        process = identity_of(child.pid)
        fd, stat = watch.acquire(process)
        assert min(fd, stat) >= 0
        assert not is_over(fd)
        child.send_signal(signal.SIGKILL)
        select.select([fd], [], [], 20)
        assert is_over(fd)
        assert os.waitstatus_to_exitcode(wait_status(process)) == -signal.SIGKILL
        child.wait()
        assert is_over(fd)
        assert wait_status(process) is None
        watch.release(process)


def test_one_descriptor_serves_all_groups_and_is_closed_with_the_last():
    me = ProcessId.of_self()
    first, second = watch.acquire(me), watch.acquire(me)
    assert first == second
    watch.release(me)
    assert not is_over(first.pidfd)
    watch.release(me)
    assert not any(os.path.islink(f"/proc/self/fd/{fd}") for fd in first)
    watch.release(me)  # once too often: nothing happens


def test_a_number_that_was_given_to_another_process_tells_that_the_first_is_gone():
    # It used to be "cannot be watched": a rank that died while its group was being made was found by the deadline only.
    me = ProcessId.of_self()
    earlier = dataclasses.replace(me, start_ticks=me.start_ticks - 1)
    assert is_over(watch.acquire(earlier).pidfd)
    watch.release(earlier)
    assert wait_status(earlier) is None


def test_a_process_that_is_gone_before_it_is_watched_is_gone():
    with a_child() as child:
        process = identity_of(child.pid)
        child.kill()
        child.wait()
    assert is_over(watch.acquire(process).pidfd)
    watch.release(process)


def test_processes_watch_each_other_in_one_namespace_where_all_may():
    me = ProcessId.of_self()
    assert can_watch_each_other([me, me])
    assert not can_watch_each_other([me, dataclasses.replace(me, namespace="pid:[1] time:[2]")])
    assert not can_watch_each_other([me, dataclasses.replace(me, has_pidfds=False)])
    unknown = dataclasses.replace(me, namespace="")
    assert not can_watch_each_other([unknown, unknown])


def test_how_a_process_of_another_namespace_ended_is_not_read_off_one_with_its_number():
    with a_child() as child:
        process = identity_of(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert wait_status(process) == signal.SIGKILL
        assert wait_status(dataclasses.replace(process, namespace="pid:[1] time:[2]")) is None
        assert wait_status(dataclasses.replace(process, start_ticks=1)) is None
        child.wait()


def test_a_rank_that_may_open_no_more_files_says_so_and_keeps_none():
    me = ProcessId.of_self()
    children = [a_child() for _ in range(2)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = set(os.listdir("/proc/self/fd"))
    try:
        others = [identity_of(child.pid) for child in children]
        lowest = os.open(os.devnull, os.O_RDONLY)  # one more may be opened
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, before[1]))
        with pytest.raises(PhalanxError, match="cannot be watched: Too many open files"):
            Pidfds([me, *others], 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert set(os.listdir("/proc/self/fd")) == kept
        for child in children:
            child.kill()
            child.communicate()


def test_start_times_are_those_of_the_process_even_when_its_name_has_spaces_and_brackets():
    ticks = read_start_ticks(os.getpid())
    assert ticks == ProcessId.of_self().start_ticks
    assert ticks > 0
    assert read_start_ticks(2**22 + 1) is None
    name = "a) R (b 1 2"
    with open("/proc/self/comm", "r+") as f:
        old = f.read().strip()
        f.seek(0)
        f.write(name)
    try:
        assert read_start_ticks(os.getpid()) == ticks
        assert wait_status(ProcessId.of_self()) is None
    finally:
        with open("/proc/self/comm", "w") as f:
            f.write(old)


def stat_line(name, state, flags, exit_code):
    """A line of /proc/PID/stat."""
    fields = [state, *["7"] * 5, str(flags), *["7"] * 42, str(exit_code)]
    return f"17 ({name}) {' '.join(fields)}\n"


@pytest.mark.parametrize("name", ["python", ") S 1 1 1 1 1 4194308 1 9"])
@pytest.mark.parametrize(
    ("state", "flags", "exit_code", "ends"),
    [
        ("S", 0x400000, 0, False),
        ("R", 0x400004, 9, True),
        ("D", 0x4, 256, True),
        ("Z", 0x40000C, 11, True),
        ("R", 0x400004, 0, False),  # a thread that has ended while its process goes on looks like this
        ("T", 0x400000, 19, False),  # the signal that has stopped it
    ],
)
def test_a_rank_that_is_being_ended_is_lost_before_its_pidfd_says_so(tmp_path, name, state, flags, exit_code, ends):
    line = stat_line(name, state, flags, exit_code)
    assert (find_exit_status(line.rpartition(")")[2].split()) is not None) == ends
    path = tmp_path / "stat"
    path.write_text(line)
    nbytes = _core.group_bytes(2, 131072, channel_bytes(2))
    with mmap.mmap(-1, nbytes) as memory, a_child() as child, path.open() as stat:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _core.format(address, 2, 131072, channel_bytes(2), 0)
        pidfd = os.pidfd_open(child.pid)
        core = _core.Group(address, nbytes, 0, 0, 0, (-1, pidfd), (-1, stat.fileno()), None)
        core.join(os.getpid(), 1)
        status = core.barrier(50_000_000, 0, ())
        assert (status, core.failed_rank) == ((PEER_LOST if ends else DEADLINE), 1)
        assert core.alive(1)
        core.abandon()
        os.close(pidfd)
        child.kill()
        child.wait()


def test_how_a_process_is_being_ended_is_known_while_its_memory_is_freed():
    with a_child("held = b'x' * 500_000_000; print('held', flush=True); import time; time.sleep(600)") as child:
        assert child.stdout.readline() == b"held\n"
        pidfd = os.pidfd_open(child.pid)
        os.kill(child.pid, signal.SIGKILL)
        while (status := find_exit_status(read_stat(child.pid))) is None:
            pass
        assert status == signal.SIGKILL
        select.select([pidfd], [], [], 20)
        assert wait_status(identity_of(child.pid)) == signal.SIGKILL
        os.close(pidfd)
        child.wait()
