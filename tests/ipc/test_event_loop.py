"""The loop of the agent: in which order its sources are called, and when."""

from __future__ import annotations

import os
import time

from phalanx._base.ipc.event_loop import EventLoop, Source


def test_each_source_is_called_once_a_turn_in_the_order_in_which_they_came() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"x")
        called: list[tuple[str, bool]] = []
        loop = EventLoop(
            Source(lambda ready: called.append(("first", read in ready)), lambda: (read,)),
            Source(lambda ready: called.append(("second", read in ready))),
            Source(lambda ready: called.append(("third", write in ready)), writable=lambda: (write,)),
        )
        loop.turn()
        assert called == [("first", True), ("second", True), ("third", True)]
        os.read(read, 1)
        called.clear()
        loop.turn()
        assert called == [("first", False), ("second", False), ("third", True)]
    finally:
        os.close(read)
        os.close(write)


def test_one_descriptor_may_be_waited_for_by_two_sources() -> None:
    """The agent reads from a rank's line and, while something is queued for it, waits for room there, too."""
    read, write = os.pipe()
    try:
        ready_fds: list[set[int]] = []
        loop = EventLoop(Source(ready_fds.append, lambda: (write,), lambda: (write,)))
        loop.turn()
        assert ready_fds == [{write}]
    finally:
        os.close(read)
        os.close(write)


def test_a_turn_ends_when_the_first_source_is_due_or_the_limit_is_over() -> None:
    turns = []
    due: list[float | None] = [time.monotonic() - 1.0, time.monotonic() + 3600.0, None]
    sources = [Source(lambda ready: turns.append(ready), due=lambda n=n: due[n]) for n in range(3)]  # type: ignore[misc]
    EventLoop(*sources).turn()
    assert turns == [set()] * 3, "one was due"
    due[0] = None
    EventLoop(*sources).turn(0.01)
    assert turns == [set()] * 6, "the limit is over"
