"""A rank that has left its group hears of its agent: a generation, why there is none, or that it does not answer."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from phalanx._base.descriptors import wait_readable
from phalanx._base.ipc.agent import listen
from phalanx._base.ipc.channel import Channel
from phalanx.elastic import channel
from phalanx.elastic.channel import AgentChannel
from phalanx.elastic.generations import NoGenerationError
from phalanx.errors import DeadlineError


@contextmanager
def agent(*answers: dict[str, Any]) -> Iterator[tuple[AgentChannel, list[dict[str, Any]]]]:
    """A rank's line to an agent that answers each of its first questions so, and no other; and what it was asked."""
    asked: list[dict[str, Any]] = []
    name = f"phalanx-test-{os.getpid()}-{os.urandom(4).hex()}"

    def serve() -> None:
        wait_readable([listener])
        with closing(Channel(listener.accept()[0])) as connection:
            connection.receive()
            connection.send({"kind": "welcome", "generation": 0})
            left = list(answers)
            while (message := connection.receive()) is not None:
                asked.append(message.content)
                if left:
                    connection.send(left.pop(0))

    with listen(name, 1) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        line = AgentChannel(f"{name}:token", 0, 0, min_ranks=1, wait_s=0.0)
        try:
            yield line, asked
        finally:
            line.close()
            thread.join()


@pytest.fixture(autouse=True)
def _ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_REQUEST_EVERY_S", 0.01)


def test_a_rank_waits_as_long_as_the_agent_says_so_and_hears_why_there_is_no_generation() -> None:
    """It waited without a word for a generation that nobody was going to begin."""
    wait = {"kind": "wait"}
    with agent(wait, wait, {"kind": "no generation", "why": "another rank has ended its training"}) as (line, asked):
        with pytest.raises(NoGenerationError, match="not formed again: another rank has ended its training"):
            line.next_generation(0, 60.0)
        assert {(one["kind"], one["generation"]) for one in asked} == {("waiting", 0)}


def test_an_agent_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, say: its ranks waited for ever."""
    monkeypatch.setattr(channel, "SILENT_AGENT_S", 0.2)
    with agent() as (line, _), pytest.raises(DeadlineError) as raised:
        line.next_generation(4, 0.1)
    assert f"(pid {os.getpid()}), which starts the next generation, has not answered within 0.2 s" in str(raised.value)
    assert f"after generation 4: this rank has left its group, and `phalanx run` on {socket.gethostname()}" in str(
        raised.value
    )
