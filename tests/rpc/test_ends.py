"""The end of a worker: whatever is under way ends with it, whoever waits for what."""

import os
import signal
import threading

import pytest
from tests.rpc.workers import join, nothing, pid, run_workers, same, until, wait_event

from phalanx import rpc
from phalanx.errors import ClosedError, PeerLostError
from phalanx.rpc import current

_WAIT_S = 60.0


class _Waiter(threading.Thread):
    """Waits for a call, and keeps what it raised."""

    def __init__(self, wait):
        super().__init__(name="phalanx-test-waiter", daemon=True)
        self._wait = wait
        self.error = None
        self.start()

    def run(self):
        try:
            self._wait()
        except BaseException as error:
            self.error = error

    def ended_with(self):
        self.join(_WAIT_S)
        assert not self.is_alive(), "it still waits"
        return type(self.error)


def _end_in_the_midst(rank, folder):
    join(rank, 3, folder)
    if rank:
        signal.pause()  # until it is killed
    agent = current.agent()
    pids = {to: rpc.rpc_sync(to, pid) for to in ("w1", "w2")}

    def never(to):
        return rpc.rpc_async(to, wait_event, ("never",), timeout=0).wait

    def never_over_line(to):
        return lambda: rpc.rpc_sync(to, wait_event, ("never",), timeout=0)

    for to in pids:
        until(lambda to=to: rpc.rpc_sync(to, same, (1,)) and _lines(to)._idle)
    of_lost = [_Waiter(never("w1")), _Waiter(never_over_line("w1"))]
    of_open = _Waiter(never_over_line("w2"))
    first, second, third = (rpc.rpc_async("w2", wait_event, ("never",), timeout=0) for _ in range(3))
    heard, late = [], []
    first.add_done_callback(lambda _: heard.append(_Waiter(second.wait).ended_with()))
    until(lambda: not _lines("w2")._idle and not _lines("w1")._idle)
    forgetting, closing = threading.Event(), threading.Event()
    forget, close = agent.membership.forget, agent.reader.close

    def forget_slowly(member):  # the job's store answers when the end has begun
        forgetting.set()
        assert closing.wait(_WAIT_S)
        forget(member)

    def close_and_wait():
        closing.set()
        close()
        late.append(_Waiter(third.wait))  # it begins to wait when nobody reads any more

    agent.membership.forget, agent.reader.close = forget_slowly, close_and_wait
    os.kill(pids["w1"], signal.SIGKILL)
    assert forgetting.wait(_WAIT_S)
    rpc.shutdown(graceful=False)
    assert [one.ended_with() for one in of_lost] == [PeerLostError] * 2
    assert of_open.ended_with() is ClosedError
    assert heard == [ClosedError]
    assert late[0].ended_with() is ClosedError
    with pytest.raises(ClosedError):
        rpc.rpc_sync("w2", nothing)
    os.kill(pids["w2"], signal.SIGKILL)


def _lines(to):
    return current.agent().peer(current.agent().membership.find(to)).connection.lines


def test_all_calls_fail_at_the_end_of_a_worker_in_whatever_state_they_are():
    """A call waited for ever if its worker was lost while the end began (its failure was queued, and dropped with the
    queue); so did the end itself, where one call's callback waited for another call, which was to fail next; and who
    began to wait in the midst of it got a ValueError of a closed epoll object."""
    run_workers(_end_in_the_midst, 3, lost=[1, 2])
