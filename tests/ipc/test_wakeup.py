"""Who waits on a descriptor is woken by another thread, and finds what that one has left."""

import os
import select
import threading

import pytest

from phalanx._base.descriptors import wait_readable
from phalanx._base.ipc.wakeup import Mailbox, Wakeup


@pytest.fixture(params=["eventfd", "pipe"])
def wakeup(request, monkeypatch):
    if request.param == "pipe":  # as on other systems than Linux
        monkeypatch.delattr(os, "eventfd")
    made = Wakeup()
    yield made
    made.close()


def test_it_is_readable_from_the_ring_to_the_drain(wakeup):
    assert wait_readable([wakeup], 0.0) == []
    for _ in range(3):
        wakeup.ring()
    assert wait_readable([wakeup], 0.0) == [wakeup]
    wakeup.drain()
    assert wait_readable([wakeup], 0.0) == []
    wakeup.drain()


def test_it_may_be_rung_more_often_than_a_pipe_holds(wakeup):
    for _ in range(20_000):
        wakeup.ring()
    wakeup.drain()
    assert wait_readable([wakeup], 0.0) == []


def test_it_is_not_inherited_and_closes_once(wakeup):
    fds = {wakeup._read, wakeup._write}
    assert not any(os.get_inheritable(fd) for fd in fds)
    wakeup.close()
    wakeup.close()
    wakeup.ring()
    wakeup.drain()
    assert wakeup.fileno() == -1
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_sleeping_thread_finds_all_letters_in_order():
    mailbox = Mailbox()
    found = []

    def take():
        poll = select.poll()
        poll.register(mailbox, select.POLLIN)
        while len(found) < 1000:
            poll.poll()
            found.extend(mailbox.receive_all())

    reader = threading.Thread(target=take)
    reader.start()
    for number in range(1000):
        mailbox.put(number)
    reader.join()
    assert found == list(range(1000))
    assert mailbox.receive_all() == []
    mailbox.close()
