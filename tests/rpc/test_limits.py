"""What goes wrong around a call: functions that block, signals, forks, no more descriptors or memory, sizes."""

import contextlib
import ctypes
import gc
import math
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.rpc.workers import join, nothing, pid, run_caller, run_workers, same, set_event, until, wait_event, worker

from phalanx import rpc
from phalanx.errors import ClosedError, DeadlineError, PhalanxError
from phalanx.rpc import autograd, current, start
from phalanx.rpc.agent import interrupts


def _check_blocked_functions():
    stuck = [rpc.rpc_async("w1", wait_event, ("end",), timeout=0) for _ in range(1000)]
    with pytest.raises(DeadlineError, match=r"rpc_sync\(same\) to worker 'w1' .* set timeout \(50 ms\)"):
        rpc.rpc_sync("w1", same, (1,), timeout=0.05)
    made = rpc.remote("w1", same, (2,))
    member = current.agent().membership.find("w1")
    current.agent().controls["same"] = lambda member, argument: argument
    assert current.agent().control(current.agent().me, "same", 3).wait() == 3
    current.agent().control(member, "set", "end").wait()
    assert [one.wait() for one in stuck] == ["end"] * 1000
    assert made.to_here() == 2


def _check_gil(sign):
    holds = rpc.rpc_async("w1", _hold_the_gil, (1, sign))
    until(Path(sign).exists)
    with pytest.raises(DeadlineError, match="worker 'w1'"):
        rpc.rpc_sync("w1", nothing, timeout=0.1)
    holds.wait()
    assert rpc.rpc_sync("w1", same, (4,)) == 4


def _hold_the_gil(seconds, sign):
    """As a C extension does that never lets go of it: no other thread of Python's runs meanwhile."""
    libc = ctypes.PyDLL(None)
    libc.creat(sign.encode(), 0o600)
    libc.sleep(seconds)


def _check_stopped():
    its_pid = rpc.rpc_sync("w1", pid)
    os.kill(its_pid, signal.SIGSTOP)
    try:
        until(lambda: Path(f"/proc/{its_pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        with pytest.raises(DeadlineError, match=rf"rpc_sync\(same\) to worker 'w1' \(rank 1, pid {its_pid} on "):
            rpc.rpc_sync("w1", same, (5,), timeout=0.1)
        with pytest.raises(DeadlineError):  # more than the kernel takes for a process that does not read
            rpc.rpc_sync("w1", same, (b"x" * (1 << 22),), timeout=0.1)
    finally:
        os.kill(its_pid, signal.SIGCONT)
    assert rpc.rpc_sync("w1", same, (6,)) == 6
    until(lambda: not current.agent().num_in_flight)


def _blocked(rank, folder):
    start.on_start.append(lambda agent: agent.controls.update(set=lambda member, name: set_event(name)))
    with worker(rank, 2, folder, num_worker_threads=4):
        if rank == 0:
            _check_blocked_functions()
            _check_gil(f"{folder}/holds")
            _check_stopped()


@pytest.mark.slow
def test_functions_that_block_and_workers_that_are_stopped_fail_calls_by_their_time_out_alone():
    run_workers(_blocked, 2)


def _interrupt(rank, folder):
    """Each call begins, which is told, and then this process sends Ctrl-C to itself."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background ignores it
    with worker(rank, 2, folder):
        if rank:
            return
        for name, to, num_calls, call in (
            ("sync", "w1", 1, lambda: rpc.rpc_sync("w1", _begin, (folder, "sync"))),
            ("async", "w1", 1, lambda: rpc.rpc_async("w1", _begin, (folder, "async")).wait()),
            ("rref", "w1", 2, lambda: rpc.remote("w1", _begin, (folder, "rref")).to_here()),
            ("here", "w0", 1, lambda: rpc.rpc_sync("w0", _begin, (folder, "here"))),
        ):
            arguments = folder, name, num_calls
            thread = threading.Thread(target=_interrupt_when_begun, args=arguments, name="phalanx-test-interrupt")
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                call()
            thread.join()
            assert rpc.rpc_sync("w1", same, (name,)) == name
            rpc.rpc_sync(to, set_event, (name,))
            until(lambda: not current.agent().num_in_flight)


def _begin(folder, name):
    Path(folder, name).touch()
    return wait_event(name)


def _interrupt_when_begun(folder, name, num_calls):
    until(Path(folder, name).exists)
    until(lambda: current.agent().num_in_flight == num_calls)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_interrupts_a_waiting_call_and_the_next_one_works():
    """`Future.wait` waits in C++, where no signal is heard: Ctrl-C came when the answer had, a minute later."""
    run_workers(_interrupt, 2)


def _fork(rank, folder):
    with worker(rank, 2, folder):
        assert rpc.rpc_sync(f"w{1 - rank}", same, (1,)) == 1
        tensor = rpc.rpc_sync(f"w{1 - rank}", same, (torch.ones(1 << 16),))
        rref = rpc.remote(f"w{1 - rank}", same, (2,))
        interrupts.defer()  # as where a reader hands out an answer, and its callback forks
        child = os.fork()
        if child == 0:
            code = 1 if interrupts._state.depth == 0 else 6
            with contextlib.suppress(BaseException):
                code = code if code == 6 else _in_child(rref, tensor, f"{folder}/child-{rank}")
            os._exit(code)
        interrupts.allow()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert rref.to_here() == 2
        assert tensor.sum() == 1 << 16
        assert rpc.rpc_sync(f"w{1 - rank}", same, (3,)) == 3


def _in_child(rref, tensor, folder):
    """Zero if it is no worker, and can become one of its own."""
    try:
        rpc.rpc_sync("w1", nothing)
    except ClosedError:
        pass
    else:
        return 2
    with contextlib.suppress(ClosedError):
        rref.to_here()
        return 3
    del rref
    if tensor.sum() != 1 << 16:
        return 4
    os.mkdir(folder)
    with worker(0, 1, folder):
        return 0 if rpc.rpc_sync("w0", same, (5,)) == 5 else 5


def _timeouts():
    for to in ("w0", "w1"):
        rref = rpc.remote(to, same, (5,))
        for seconds in (0, 30, math.inf, 1e10, -1, True):
            assert rpc.rpc_sync(to, same, (5,), timeout=seconds) == 5
            assert rref.to_here(timeout=seconds) == 5
            assert rref.rpc_sync(timeout=seconds).bit_length() == 3
        for wrong, error in ((math.nan, ValueError), ("3", TypeError), (None, TypeError)):
            calls = [
                lambda to=to, wrong=wrong: rpc.rpc_sync(to, same, (5,), timeout=wrong),
                lambda to=to, wrong=wrong: rpc.remote(to, same, (5,), timeout=wrong),
                lambda rref=rref, wrong=wrong: rref.to_here(timeout=wrong),
            ]
            for call in calls:
                with pytest.raises(error, match="timeout is a number of seconds"):
                    call()


def test_timeouts_mean_the_same_everywhere_and_invalid_ones_are_refused():
    """Infinity ended init_rpc, and what is no number meant an internal error, or nothing on another worker."""
    run_caller(_timeouts, 2, options=dict(rpc_timeout=math.inf))


class Handle:
    """It is garbage of a circle, whose end is told to another worker."""

    ended = 0

    def __init__(self):
        self.me = self

    def __del__(self):
        assert rpc.rpc_sync("w1", same, (7,)) == 7
        Handle.ended += 1


def _finalizers():
    before = gc.get_threshold()
    draw = random.Random(1)
    try:
        for number in range(300):
            gc.set_threshold(draw.randint(5, 150), 2, 2)
            Handle()
            calls = [rpc.rpc_async("w1", same, ([[one] for one in range(10)],)) for _ in range(3)]
            assert rpc.rpc_sync("w1", same, (number,)) == number
            assert all(call.wait() == [[one] for one in range(10)] for call in calls)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert Handle.ended == 300


def test_finalizers_may_call_wherever_the_collector_runs_them():
    """One ran while its thread connected or read, waited for what that thread held, and hung."""
    run_caller(_finalizers, 2, options=dict(rpc_timeout=30))


class Alarm(Exception):
    pass


def _raise_alarm(*_):
    raise Alarm


def _alarms():
    others = threading.Event()

    def call():
        number = 0
        while not others.is_set():
            number += 1
            assert rpc.rpc_sync("w1", same, (number,)) == number

    before = signal.signal(signal.SIGALRM, _raise_alarm)
    thread = threading.Thread(target=call, name="phalanx-test-caller")
    thread.start()
    num_alarms = 0
    draw = random.Random(3)
    for _ in range(150):
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0001, 0.004))
            for _ in range(100):
                x = torch.ones(draw.choice([2, 1 << 16]))
                assert torch.equal(rpc.rpc_sync("w1", same, (x,)), x)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Alarm:
            num_alarms += 1
        assert rpc.rpc_sync("w1", same, (5,)) == 5
    signal.signal(signal.SIGALRM, before)
    others.set()
    thread.join()
    assert num_alarms > 50
    assert current.agent().num_in_flight == 0


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 14),
    reason="in Python 3.14 a signal handler that raises may leave a lock acquired",
)
def test_an_exception_of_a_signal_handler_ends_a_call_and_nothing_else():
    """Where it came while the main thread read, the other worker counted as lost from then on."""
    run_caller(_alarms, 2)


def test_a_fork_of_a_worker_is_none_and_may_become_one():
    run_workers(_fork, 2)


@contextlib.contextmanager
def _limit(what, most):
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def _limits(rank, folder):
    with worker(rank, 3, folder):
        if rank == 2:
            wait_event("end")
        if rank:
            return
        big = torch.arange(1 << 16)
        with _limit(resource.RLIMIT_FSIZE, 4096):  # no memory can be shared: as with a full one
            assert torch.equal(rpc.rpc_sync("w1", same, (big,)), big)
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1
        with _limit(resource.RLIMIT_NOFILE, most), _all_used():
            with pytest.raises(PhalanxError, match=r"cannot connect to worker 'w2' .*: Too many open files"):
                rpc.rpc_sync("w2", nothing)
            assert rpc.rpc_sync("w1", same, (1,)) == 1
        assert rpc.rpc_sync("w2", same, (2,)) == 2, "nobody was lost"
        _check_callee(big)
        _check_backward()
        rpc.rpc_sync("w2", set_event, ("end",))


@contextlib.contextmanager
def _all_used():
    used = []
    with contextlib.suppress(OSError):
        while True:
            used.append(os.open("/dev/null", os.O_RDONLY))
    try:
        yield
    finally:
        for fd in used:
            os.close(fd)


_used = contextlib.ExitStack()


def _use_all():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    _used.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    _used.enter_context(_all_used())


def _close_all():
    _used.close()


def _check_callee(big):
    """The callee has no descriptor for the memory of a tensor, nor for the connection of a worker that is new to it."""
    rpc.rpc_sync("w1", _use_all)
    others = [torch.arange(n << 16) for n in (5, 9)]  # in segments of their own
    for other in others:
        with pytest.raises(PhalanxError, match="reached its limit of open files"):
            rpc.rpc_sync("w1", same, (other,))
    assert rpc.rpc_sync("w1", same, (big[:9],)).sum() == 36
    calls = rpc.rpc_async("w2", _call, ("w1",))
    with pytest.raises(TimeoutError):
        rpc.rpc_sync("w2", _call, ("w1", 0.2))
    rpc.rpc_sync("w1", _close_all)
    assert calls.wait() == 7
    for other in others:
        assert torch.equal(rpc.rpc_sync("w1", same, (other,)), other)


def _check_backward():
    """Gradients that cannot be taken in are told to who waits for them: backward hung, and only the log said why."""
    ones = torch.ones(1 << 21, requires_grad=True)
    with autograd.context() as context:
        twice = rpc.rpc_sync("w1", _double, (ones,))
        _use_all()
        try:
            with pytest.raises(PhalanxError, match="reached its limit of open files"):
                autograd.backward(context, [twice.sum()])
        finally:
            _close_all()
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync("w1", _double, (ones,)).sum()])
        assert autograd.get_gradients(context)[ones][-1] == 2


def _double(tensor):
    return 2 * tensor


def _call(to, timeout=0):
    return rpc.rpc_sync(to, same, (7,), timeout=timeout)


@pytest.mark.slow
def test_a_process_without_a_free_descriptor_or_memory_to_share_loses_nobody():
    """The caller's own lack of one made the worker that it called lost for ever; a callee's, the caller."""
    run_workers(_limits, 3)


def _busy_end(rank, folder):
    """All call each other while all go to the end, and calls go on to others from there."""
    with worker(rank, 3, folder, num_worker_threads=64):
        for n in range(20):
            rpc.rpc_async(f"w{(rank + 1 + n % 2) % 3}", _hop, (3,))
        slow = rpc.rpc_async(f"w{(rank + 1) % 3}", _hop, (20,))
    assert slow.wait() == 20
    with pytest.raises(ClosedError):
        rpc.rpc_sync("w0", nothing)


def _hop(times):
    if times == 0:
        return 0
    me = rpc.get_worker_info().id
    return rpc.rpc_sync(f"w{(me + 1) % 3}", _hop, (times - 1,)) + 1


def test_a_graceful_end_waits_for_calls_that_make_calls():
    run_workers(_busy_end, 3)


def _ends_while_calling(rank, folder):
    join(0, 1, folder)
    agent = current.agent()
    find = agent.peer

    def peer(to):  # as another thread would, just after this one has looked whether the worker is open
        agent.peer = find
        rpc.shutdown(graceful=False)
        return find(to)

    agent.peer = peer
    future = agent.invoke(agent.me, "rpc_async", "nothing", (nothing, (), {}))
    assert future.done()
    with pytest.raises(ClosedError, match=r"rpc_async\(nothing\) to .*: this worker was shut down before the answer"):
        future.wait()


def test_a_call_that_is_made_while_the_worker_ends_fails():
    """It was counted after all calls had been failed: nobody failed it, and who waited for it did so for ever."""
    run_workers(_ends_while_calling, 1)


def _num_owned():
    return current.agent().references.count()["num_owner_rrefs"]


def _drops_later():
    rref = rpc.remote("w1", same, (2,))
    assert rref.to_here() == 2
    assert rpc.rpc_sync("w1", _num_owned) == 1
    agent = current.agent()
    tell, refused = agent.notify, threading.Event()

    def refuse(*args):
        agent.notify = tell
        refused.set()
        raise PhalanxError("no descriptor")

    agent.notify = refuse
    del rref
    assert refused.wait(30)
    until(lambda: rpc.rpc_sync("w1", _num_owned) == 0)
    with pytest.raises(DeadlineError):
        rpc.rpc_sync("w1", wait_event, ("never",), timeout=0.05)
    rpc.rpc_sync("w1", set_event, ("never",))


def test_references_that_cannot_be_dropped_for_want_of_descriptors_are_dropped_later():
    """The clock's thread ended with the error: no call ran out of time any more, and the objects were never let go."""
    run_caller(_drops_later, 2)
