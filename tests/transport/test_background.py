"""Threads that wait in engines: shared by all groups, told of what happens, and gone with the last group."""

import os
import queue
import random
import signal
import threading
import time
from functools import partial

import pytest

from phalanx._comm.transport import background
from phalanx._comm.transport.background import Background


def background_threads():
    return [thread for thread in threading.enumerate() if thread.name == "phalanx-background"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Give the test threads of its own: groups of this process may have some."""
    monkeypatch.setattr(background, "_workers", background._Workers())
    before = set(background_threads())
    yield
    assert set(background_threads()) == before


def ignore():
    pass


@pytest.mark.parametrize("seed", range(5))
def test_there_are_as_many_threads_as_operations_at_a_time_for_all_groups(seed):
    rng = random.Random(seed)
    before = len(background_threads())
    groups = [Background() for _ in range(rng.randrange(2, 12))]
    most = 0
    for _ in range(30):
        underway = []
        for _ in range(rng.choice([0, 1, 1, 2, 5])):
            group, go_on, value = rng.choice(groups), threading.Event(), rng.random()
            outcome = group.start(partial(fail_after, go_on, value))
            underway.append((group, go_on, value, outcome))
        most = max(most, len(underway))
        assert len(background_threads()) - before == most
        rng.shuffle(underway)
        for group, go_on, value, outcome in underway:
            go_on.set()
            assert outcome.get(timeout=20.0).args == (value,)
            group.over(outcome)
    for group in groups:
        group.close()


def fail_after(go_on, value):
    go_on.wait()
    raise ValueError(value)


def test_an_operation_after_another_finds_the_same_thread():
    groups = [Background(), Background()]
    ran_in = set()
    for n in range(200):
        groups[n % 2].run(lambda: ran_in.add(threading.get_ident()), ignore)
    assert len(ran_in) == 1
    for group in groups:
        group.close()


def test_what_a_look_raises_leaves_the_operation_to_itself():
    group, go_on = Background(), threading.Event()

    def look():
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        group.run(go_on.wait, look)
    group.close()  # does not wait for what nobody ends
    assert len(background_threads()) == 1
    go_on.set()
    background_threads()[0].join(20.0)


def test_close_waits_for_what_was_interrupted():
    group, go_on, told, over = Background(), threading.Event(), [], []

    def operation():
        go_on.wait()
        time.sleep(0.05)
        over.append(True)

    def interrupted(error):
        told.append(error)
        go_on.set()

    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt) as raised:
        group.run(operation, ignore, interrupted)
    assert told == [raised.value]
    group.close()
    assert over == [True]
    timer.join()


def test_an_exception_of_a_signal_handler_interrupts_as_ctrl_c_does():
    """It passed for an exception of `look`: the operation continued, and the peers were not notified."""
    group, go_on, told = Background(), threading.Event(), []

    def interrupted(error):
        told.append(error)
        go_on.set()

    def time_is_up(number, frame):
        raise TimeoutError("time is up")

    before = signal.signal(signal.SIGALRM, time_is_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError) as raised:
            group.run(go_on.wait, ignore, interrupted)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert told == [raised.value]
    group.close()


def test_a_fork_has_threads_of_its_own():
    group = Background()
    group.run(ignore, ignore)  # the thread that is idle now is not in the child
    child = os.fork()
    if child == 0:
        outcome: queue.SimpleQueue[BaseException | None] = Background().start(ignore)
        os._exit(0 if outcome.get(timeout=20.0) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    group.close()
