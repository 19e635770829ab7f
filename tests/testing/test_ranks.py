import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import DeadlineError
from phalanx.testing import RankFailed, faults, run_ranks


def add_up(rank, world_size, start=0.0):
    tensor = torch.tensor([start + rank])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_returns_its_own_result_in_the_order_of_the_ranks(world_size):
    results = run_ranks(lambda rank, world_size: (rank, world_size, os.getpid()), world_size, init=False)
    assert [(rank, size) for rank, size, _ in results] == [(rank, world_size) for rank in range(world_size)]
    assert len({pid for *_, pid in results} | {os.getpid()}) == world_size + 1


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_ranks_have_a_group(backend):
    assert run_ranks(add_up, 2, 10.0, backend=backend) == [21.0, 21.0]


def test_the_group_is_over_phalanx_unless_another_backend_is_named():
    assert run_ranks(lambda *_: dist.get_backend(), 2) == ["phalanx", "phalanx"]


def test_a_rank_has_one_intra_op_thread():
    assert run_ranks(lambda *_: torch.get_num_threads(), 2, init=False) == [1, 1]


def test_tensors_and_large_results_come_back_whole():
    results = run_ranks(lambda rank, _: torch.full((1 << 20,), rank), 2, init=False)
    assert [int(result.sum()) for result in results] == [0, 1 << 20]


def test_the_message_holds_the_traceback_of_every_rank_that_failed():
    def fail(rank, world_size):
        if rank != 1:
            raise ValueError(f"bad luck of {rank}")
        return "fine"

    with pytest.raises(RankFailed) as caught:
        run_ranks(fail, 3, init=False)
    message = str(caught.value)
    assert "fail on 3 ranks: ranks 0, 2 did not return." in message
    for rank in (0, 2):
        assert f"--- rank {rank}: raised ValueError" in message
        assert f"ValueError: bad luck of {rank}" in message
    assert 'raise ValueError(f"bad luck of {rank}")' in message
    assert str(caught.value.errors[0]) == "bad luck of 0"
    assert caught.value.results == {1: "fine"}
    assert caught.value.running == ()


def test_an_exception_that_cannot_be_pickled_is_still_told():
    class Local(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    def fail(rank, world_size):
        raise Local("the story", 2)

    with pytest.raises(RankFailed, match="the story") as caught:
        run_ranks(fail, 1, init=False)
    assert caught.value.errors == {}


def test_a_result_that_cannot_be_pickled_is_named():
    with pytest.raises(RankFailed, match="returned a function, which cannot be pickled"):
        run_ranks(lambda *_: lambda: None, 1, init=False)


def test_a_rank_that_is_killed_is_reported_by_its_signal():
    def fail(rank, world_size):
        faults.kill(1).strike(rank)

    with pytest.raises(RankFailed, match="--- rank 1: died by SIGKILL"):
        run_ranks(fail, 2, init=False)


def test_a_crash_is_reported_with_the_place_where_it_happened():
    def fail(rank, world_size):
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankFailed) as caught:
        run_ranks(fail, 1, init=False)
    assert "rank 0: died by SIGSEGV" in str(caught.value)
    assert "test_ranks.py" in str(caught.value)


def test_a_rank_that_leaves_without_returning_is_reported_by_its_exit_code():
    def fail(rank, world_size):
        faults.leave(0, exit_code=7).strike(rank)

    with pytest.raises(RankFailed, match="--- rank 0: exited with code 7 before its function returned"):
        run_ranks(fail, 2, init=False)


def test_leaving_through_sys_exit_is_a_failure_too():
    with pytest.raises(RankFailed, match="raised SystemExit"):
        run_ranks(lambda *_: sys.exit(0), 1, init=False)


def test_when_time_is_up_the_message_says_who_was_still_running_and_where():
    def hang(rank, world_size):
        if rank == 1:
            threading.Event().wait()

    with pytest.raises(RankFailed) as caught:
        run_ranks(hang, 2, init=False, timeout=1.0)
    message = str(caught.value)
    assert "rank 1 did not return, rank 1 still running after 1.0 s." in message
    assert "test_ranks.py" in message
    assert "in hang" in message
    assert caught.value.running == (1,)


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_collective_is_told_by_the_group_before_time_is_up():
    def hang(rank, world_size):
        if rank == 0:
            dist.barrier()
        else:
            threading.Event().wait()

    with pytest.raises(RankFailed) as caught:
        run_ranks(hang, 2, backend="gloo", timeout=4.0)
    assert 0 in caught.value.errors
    assert caught.value.running == (1,)


@pytest.mark.parametrize("fault", [faults.kill(1, step=2), faults.stop(1, step=2), faults.leave(1, step=2)])
def test_a_rank_that_the_test_loses_on_purpose_is_no_failure(fault):
    def train(rank, world_size):
        for step in range(3):
            fault.strike(rank, step)
        return step

    assert run_ranks(train, 3, init=False, lost=(1,)) == [2, None, 2]


def test_a_rank_that_was_to_be_lost_must_not_return():
    with pytest.raises(RankFailed, match="rank 1: is in `lost`, but its function returned"):
        run_ranks(lambda *_: None, 2, init=False, lost=(1,))


def test_a_rank_that_was_to_be_lost_must_not_raise_either():
    def fail(rank, world_size):
        if rank == 1:
            raise DeadlineError("too late", missing=(0,))

    with pytest.raises(RankFailed, match="rank 1: raised DeadlineError") as caught:
        run_ranks(fail, 2, init=False, lost=(1,))
    assert caught.value.errors[1].missing == (0,)


def test_a_delay_is_a_real_one():
    def train(rank, world_size):
        begin = time.monotonic()
        faults.delay(1, seconds=0.1).strike(rank)
        return time.monotonic() - begin >= 0.1

    assert run_ranks(train, 2, init=False)[1]


def test_what_a_rank_started_ends_with_it():
    def start_a_sleeper(rank, world_size):
        subprocess.Popen(["sleep", "1000"], pass_fds=[write])

    read, write = os.pipe()
    run_ranks(start_a_sleeper, 1, init=False)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == ""  # returns when the last process that could write is gone


def test_ranks_end_with_the_process_that_runs_them():
    script = r"""
import os, signal
from phalanx.testing import run_ranks

def report(rank, world_size):
    os.write(1, b"%d\n" % os.getpid())
    signal.pause()

run_ranks(report, 2, init=False)
"""
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with caller:
        pids = [int(caller.stdout.readline()) for _ in range(2)]
        handles = [os.pidfd_open(pid) for pid in pids]
        caller.kill()
    try:
        for handle in handles:  # readable when the process has ended
            assert select.select([handle], [], [], 30) == ([handle], [], [])
    finally:
        for handle in handles:
            os.close(handle)


@pytest.mark.slow
def test_a_caller_with_threads_gets_ranks_that_are_spawned():
    """A closure was refused then: only what a module holds could be pickled. It goes by value now."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="keeper")
    thread.start()
    try:
        assert run_ranks(add_up, 1, 10.0, backend="gloo") == [10.0]
        assert run_ranks(lambda *_: lambda: "a closure", 1, init=False)[0]() == "a closure"
        with pytest.raises(TypeError, match="these threads run, which a fork would lose: keeper") as caught:
            run_ranks(lambda *_: done, 1, init=False)
        assert "'done', a variable around" in str(caught.value)
        assert "(a Event) cannot be sent to other processes: TypeError: cannot pickle" in str(caught.value)
    finally:
        done.set()
        thread.join()


def test_what_cannot_be_sent_is_refused_before_anything_is_spawned():
    with pytest.raises(TypeError, match=r"run_ranks: start='spawn': argument 1 \(a generator\) cannot be sent"):
        run_ranks(add_up, 1, 1.0, (word for word in "never"), init=False, start="spawn")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"world_size": 0}, "world_size must be 1 or more, got 0"),
        ({"world_size": 2, "lost": (2,)}, r"lost names ranks \[2\], but the ranks are 0 to 1"),
        ({"world_size": 2, "timeout": 0}, "timeout must be a finite span above zero, got 0"),
        ({"world_size": 2, "timeout": None}, "timeout must be a finite span above zero, got None"),
        ({"world_size": 2, "start": "thread"}, "start must be 'fork' or 'spawn', got 'thread'"),
    ],
)
def test_a_wrong_argument_is_refused_at_the_door(kwargs, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(add_up, **kwargs)
