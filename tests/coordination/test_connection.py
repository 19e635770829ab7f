"""A client's end of the connection: what it holds while it looks around, and whose turn it is to read."""

import threading

import pytest

import phalanx._comm.control.connection as connection_module
from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._job.coordinator.service import Service
from phalanx.errors import AuthenticationError, DeadlineError

KEY = Key.generate()


def test_who_is_at_the_other_end_is_asked_without_the_lock(monkeypatch):
    """Up to 2 s a byte, in which no other thread of the process could call, and no heartbeat was sent."""
    client = Client.__new__(Client)
    explain, was_locked = connection_module.explain_refusal, []

    def look(*arguments):
        was_locked.append(client._lock.locked())
        return explain(*arguments)

    monkeypatch.setattr(connection_module, "explain_refusal", look)
    with (
        Service("127.0.0.1:0", KEY) as service,
        pytest.raises(AuthenticationError, match="does not accept this host's key"),
    ):
        client.__init__(str(service.address), Key.generate())
    assert was_locked
    assert not any(was_locked)


class Watched(Client):
    """One that tells whether it let go of the lock after a send, and before it had read."""

    def _reset(self):
        super()._reset()
        watched, lock = self, threading.Lock()
        self.is_unread = False
        self.num_sent = self.num_unread = 0

        class WatchedLock:
            def __enter__(self):
                lock.acquire()

            def __exit__(self, *_):
                watched.num_unread += watched.is_unread
                watched.is_unread = False
                lock.release()

        self._lock = WatchedLock()

    def _transmit_raw(self, message):
        super()._transmit_raw(message)
        self.is_unread = True
        self.num_sent += 1

    def _read(self):
        super()._read()
        self.is_unread = False


def test_whoever_sends_reads_before_it_lets_go_of_the_lock():
    """ZeroMQ tells of what has arrived once. A send of another thread took that away from the reader, which then slept
    for 3 s beside an answer: after a call whose time was up, or after `take` had told of what it took."""
    with Service() as service, Watched(service.local) as client, Client(service.local) as other:
        me = client.join({"host": "watched"})
        with pytest.raises(DeadlineError):
            client.get("never", timeout=0.01)
        other.join({"host": "other"})
        other.post(me, bytes(2 << 20))
        while not any(event.kind == "message" for event in client.wait_event()):
            pass
        assert client.num_sent > 4
        assert client.num_unread == 0


def test_who_waits_reads_where_the_reader_stopped_just_before():
    """It slept for half a second: the reader looked for one who waits before this one said that it did."""

    class Reading:
        """Taken at the first try, by one who stops right then."""

        def __init__(self, client):
            self.client, self.lock, self.tries, self.has_said_so = client, threading.Lock(), 0, False

        def acquire(self, blocking=True):
            self.tries += 1
            if self.tries == 1:
                return False
            if self.tries == 2:
                self.has_said_so = any(call.wake is not None for call in self.client._calls.values())
            return self.lock.acquire(blocking)

        def release(self):
            self.lock.release()

        def __enter__(self):
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    with Service() as service, Client(service.local) as client:
        reading = client._reader.turn = Reading(client)
        with pytest.raises(DeadlineError):
            client.get("never", timeout=0.01)
        assert reading.has_said_so
