"""The agent's socket is reached by name; who reaches nobody hears so, and waits no longer than it said."""

import contextlib
import os

import pytest

from phalanx._base.ipc.agent import connect, listen, notify, request
from phalanx._base.ipc.channel import Channel


@pytest.fixture
def name():
    return f"phalanx-test-{os.getpid()}-{os.urandom(4).hex()}"


def test_what_is_told_carries_the_token_and_descriptors(name):
    read, write = os.pipe()
    with listen(name, 1) as listener:
        assert notify(f"{name}:secret", "page", fds=[write], size=3)
        with contextlib.closing(Channel(listener.accept()[0])) as channel:
            (message,) = channel.receive_available()
    assert message.content == {"kind": "page", "token": "secret", "size": 3}
    os.close(write)
    message.close()
    assert os.read(read, 1) == b""
    os.close(read)


@pytest.mark.parametrize("agent", ["phalanx-nobody:secret", "", "x", "y" * 300 + ":z"])
def test_who_reaches_no_agent_hears_so(agent):
    assert not notify(agent, "page")
    assert request(agent, "store", 1.0) == ()


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_a_full_queue_is_waited_for_as_long_as_was_said(name, timeout_s):
    with listen(name, 0), contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(connect(name)))
        with pytest.raises(TimeoutError, match="accepts no connection"):
            connect(name, timeout_s)
        assert not notify(f"{name}:secret", "page")


def test_who_asks_an_agent_that_does_not_answer_gets_nothing(name):
    with listen(name, 1):
        assert request(f"{name}:secret", "store", 0.05) == ()
