import threading
from concurrent.futures import wait

import pytest

from phalanx._base.threads import call_in_thread, join_all


def test_threads_are_joined_for_so_long_in_all_and_the_one_that_calls_is_not():
    gate = threading.Event()
    waiting = [threading.Thread(target=gate.wait, daemon=True) for _ in range(3)]
    ended = threading.Thread(target=int)
    for thread in (*waiting, ended):
        thread.start()
    join_all([threading.current_thread(), *waiting, ended], 0.05)
    assert all(thread.is_alive() for thread in waiting)
    gate.set()
    join_all(waiting, 60.0)
    assert not any(thread.is_alive() for thread in waiting)


def test_a_call_in_a_thread_has_its_result_or_its_exception():
    caller = threading.current_thread()
    assert call_in_thread(threading.current_thread, "phalanx-test").result(60) is not caller
    with pytest.raises(SystemExit):
        call_in_thread(lambda: exit(1), "phalanx-test").result(60)


def test_a_wait_for_a_call_in_a_thread_ends_with_its_time():
    gate = threading.Event()
    call = call_in_thread(gate.wait, "phalanx-test")
    assert not wait([call], 0.01).done
    gate.set()
    assert call.result(60)
