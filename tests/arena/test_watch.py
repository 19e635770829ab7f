"""Processes are watched through descriptors that a reused process number cannot fool."""

import dataclasses
import os
import select
import signal
import subprocess
import sys

from phalanx.arena.watch import ProcessId, start_ticks, wait_status, watch


def a_child():
    return subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)


def identity_of(pid):
    return dataclasses.replace(ProcessId.of_self(), pid=pid, start_ticks=start_ticks(pid))


def is_over(fd):
    return bool(select.select([fd], [], [], 0)[0])


def test_a_watched_process_is_seen_to_end_whatever_ends_it():
    with a_child() as child:
        process = identity_of(child.pid)
        fd = watch.acquire(process)
        assert fd >= 0
        assert not is_over(fd)
        child.send_signal(signal.SIGKILL)
        select.select([fd], [], [], 20)
        assert is_over(fd)
        assert os.waitstatus_to_exitcode(wait_status(child.pid)) == -signal.SIGKILL
        child.wait()
        assert is_over(fd)
        assert wait_status(child.pid) is None
        watch.release(process)


def test_one_descriptor_serves_all_groups_and_is_closed_with_the_last():
    me = ProcessId.of_self()
    first, second = watch.acquire(me), watch.acquire(me)
    assert first == second
    watch.release(me)
    assert not is_over(first)
    watch.release(me)
    assert not os.path.islink(f"/proc/self/fd/{first}")
    watch.release(me)  # once too often: nothing happens


def test_a_number_that_was_given_to_another_process_is_not_watched():
    me = ProcessId.of_self()
    assert watch.acquire(dataclasses.replace(me, start_ticks=me.start_ticks - 1)) == -1


def test_a_process_that_is_gone_or_in_another_namespace_is_not_watched():
    with a_child() as child:
        process = identity_of(child.pid)
        child.kill()
        child.wait()
    assert watch.acquire(process) == -1
    assert watch.acquire(dataclasses.replace(ProcessId.of_self(), namespace="pid:[1]")) == -1


def test_start_times_are_those_of_the_process_even_when_its_name_has_spaces_and_brackets():
    ticks = start_ticks(os.getpid())
    assert ticks == ProcessId.of_self().start_ticks
    assert ticks > 0
    assert start_ticks(2**22 + 1) is None
    name = "a) R (b 1 2"
    with open("/proc/self/comm", "r+") as f:
        old = f.read().strip()
        f.seek(0)
        f.write(name)
    try:
        assert start_ticks(os.getpid()) == ticks
        assert wait_status(os.getpid()) is None
    finally:
        with open("/proc/self/comm", "w") as f:
            f.write(old)
