"""Messages through two pipes, whatever a login shell prints before them."""

from __future__ import annotations

import os

import pytest

from phalanx._base.ipc.event_loop import EventLoop
from phalanx._job.ssh import session
from phalanx._job.ssh.pipes import AS_TEXT, PipeChannel


@pytest.fixture
def pipes() -> tuple[int, int, int, int]:
    """The reading and writing ends here, and those on the host."""
    there, to_there = os.pipe()
    here, to_here = os.pipe()
    return here, to_there, there, to_here


def receive(channel: PipeChannel, count: int) -> list[object]:
    found: list[object] = []
    loop = EventLoop(channel.make_source(found.append, lambda: True))
    while len(found) < count and not channel.is_at_end:
        loop.turn()
    return found


def test_messages_go_both_ways_behind_noise(pipes: tuple[int, int, int, int]) -> None:
    here, to_there, there, to_here = pipes
    os.write(to_here, b"Welcome!\0phalanx ov\nYou have mail.\n")
    one = PipeChannel(here, to_there, marks=False)
    other = PipeChannel(there, to_here, marks=True)
    one.put("check", words=["a b", "ö\udc80"])
    other.put("facts", text=bytes(range(256)).decode(AS_TEXT))
    other.put("alive")
    first, second = receive(one, 2)
    assert isinstance(first, dict)
    assert first["text"].encode(AS_TEXT) == bytes(range(256))
    assert second == {"do": "alive"}
    assert receive(other, 1) == [{"do": "check", "words": ["a b", "ö\udc80"]}]
    one.close()
    other.close()


def test_an_end_that_was_closed_before_the_first_word_is_gone_and_no_error(pipes: tuple[int, int, int, int]) -> None:
    """An unknown name ended ssh before anything was written to it: the command ended by BrokenPipeError, silently."""
    here, to_there, there, to_here = pipes
    os.close(there)
    os.close(to_here)
    channel = PipeChannel(here, to_there, marks=False)
    channel.put("check")
    assert receive(channel, 1) == []
    assert channel.is_at_end
    channel.close()


@pytest.mark.slow
def test_a_login_shell_that_prints_for_ever_ends_the_channel(pipes: tuple[int, int, int, int]) -> None:
    here, to_there, there, to_here = pipes
    channel = PipeChannel(here, to_there, marks=False)
    written = 0
    loop = EventLoop(channel.make_source(lambda message: None, lambda: True))
    while not channel.is_at_end:
        written += os.write(to_here, b"noise" * 1000)
        loop.turn()
    assert written < 1 << 21
    channel.close()
    os.close(there)
    os.close(to_here)


def test_a_session_whose_connection_is_cut_ends_with_output_that_nobody_takes(
    pipes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a network cut it stayed until sshd ended: it read no more output, and waited for the output's end."""
    here, to_there, there, to_here = pipes
    monkeypatch.setattr(session, "kill_descendants", lambda *_: None)  # those of pytest
    monkeypatch.setattr(session, "_FLUSH_S", 0.0)
    signals, of_rank = os.pipe(), os.pipe()
    channel = PipeChannel(there, to_here, marks=True)
    ending = session.Session(channel, signals[0])
    ending._code, ending._is_ending, ending._outputs = 0, True, {of_rank[0]: 1}
    channel.put("output", stream=1, text="x" * (1 << 20))  # more than the pipe has room for
    assert channel.is_waiting
    ending.run()
    ending.close()
    ending._reached.close()
    for fd in (here, to_there, *signals, *of_rank):
        os.close(fd)
