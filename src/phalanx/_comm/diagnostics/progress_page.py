"""Publish a rank's progress in a page of shared memory, which other processes read without messages.

    rank ──a message, once: the descriptor of its page──▶ agent ──▶ any reader
    word 0   magic and version          word 4…     track `loop`: steps of a loop, as `phalanx.progress` counts them
         1   generation                 word 4+T…   track `state`: steps that `phalanx.elastic.State` has committed
         2   the loop that counts

A track has the number of steps done, the total number of steps (0: unknown), the samples so far, and for each of the
last 64 steps its time and the samples until then. There is one writer, which writes each word atomically, and the
number of steps done last.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx._base.ipc.agent import notify
from phalanx.errors import PhalanxError

PAGE_BYTES = 4096
KIND = "progress page"  # the kind of the message with its descriptor

_MAGIC = 0x3145_4741_5058_4C50  # "PLXPAGE1", little endian
_HEADER = 4
_RECENT = 64
_TRACK = 4 + 2 * _RECENT
_LOOP, _STATE = _HEADER, _HEADER + _TRACK
_WORDS = struct.Struct(f"={PAGE_BYTES // 8}Q")


@dataclass(frozen=True)
class Track:
    """A `Track` is a count of steps.

    `recent` has the last steps, oldest first: the time (CLOCK_MONOTONIC, ns), and the samples until then.
    """

    steps: int
    total_steps: int | None
    samples: int
    recent: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankProgress:
    """A `RankProgress` is the content of a rank's page; a track is None if nothing counts on it."""

    generation: int
    loop: Track | None
    state: Track | None


class ProgressPage:
    """A `ProgressPage` is a rank's own page. Every method is a few stores, about half a microsecond."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._words[0] = _MAGIC
        self._num_loops = 0

    def begin_loop(self, total_steps: int | None) -> int:
        """Begin a loop, and return its number for `count`. Only the loop that was begun last counts."""
        self._num_loops += 1
        words = self._words
        words[_LOOP] = 0
        words[_LOOP + 1] = total_steps or 0
        words[_LOOP + 2] = 0
        words[_LOOP + 4] = time.monotonic_ns()
        words[_LOOP + 5] = 0
        words[2] = self._num_loops
        return self._num_loops

    def count(self, loop: int, samples: int) -> None:
        """Count one more step of loop number `loop`, and this rank's samples in it."""
        words = self._words
        if words[2] == loop:
            _advance(words, _LOOP, words[_LOOP] + 1, words[_LOOP + 2] + samples)

    def commit(self, step: int, samples: int = 0) -> None:
        """Record that step number `step` is done, and this rank's samples since the last commit, if known."""
        words = self._words
        _advance(words, _STATE, step, words[_STATE + 2] + samples)

    @property
    def generation(self) -> int:
        return self._words[1]

    @property
    def state_step(self) -> int:
        return self._words[_STATE]

    def set_generation(self, generation: int) -> None:
        """Record how many times the ranks have formed their group again."""
        for listener in list(_listeners):
            listener()
        self._words[1] = generation


def _advance(words: memoryview, track: int, step: int, samples: int) -> None:
    at = track + 4 + 2 * (step % _RECENT)
    words[at] = time.monotonic_ns()
    words[at + 1] = samples
    words[track + 2] = samples
    words[track] = step


def read_page(fd: int) -> RankProgress | None:
    """Read the page with descriptor `fd`; return None if it is not a page of this version."""
    try:
        data = os.pread(fd, PAGE_BYTES, 0)
    except OSError:
        return None
    return parse_page(data)


def parse_page(data: bytes) -> RankProgress | None:
    """Parse the bytes of a page, whose writer may have been interrupted in the middle of an update."""
    if len(data) != PAGE_BYTES:
        return None
    words = _WORDS.unpack(data)
    if words[0] != _MAGIC:
        return None
    return RankProgress(words[1], _track(words, _LOOP), _track(words, _STATE))


def _track(words: tuple[int, ...], at: int) -> Track | None:
    steps, total, samples = words[at], words[at + 1], words[at + 2]
    recent = []
    for step in range(max(0, steps - _RECENT + 2), steps + 1):  # the oldest may be overwritten concurrently
        slot = at + 4 + 2 * (step % _RECENT)
        if words[slot]:
            recent.append((words[slot], words[slot + 1]))
    if not recent:
        return None
    recent = [entry for i, entry in enumerate(recent) if i == 0 or entry[0] >= recent[i - 1][0]]
    return Track(steps, total or None, samples, tuple(recent))


_listeners: list[Callable[[], None]] = []


def listen_for_generations(listener: Callable[[], None]) -> None:
    """Call `listener` before a page of this process changes its generation."""
    _listeners.append(listener)


def stop_listening(listener: Callable[[], None]) -> None:
    """Stop calling `listener`."""
    if listener in _listeners:
        _listeners.remove(listener)


_own: ProgressPage | None = None


def open_page(agent: str) -> ProgressPage:
    """Return this process's page, which the agent at `agent` ("name:token") gets on the first call.

    Without an agent, or without shared memory, no other process reads the page.
    """
    global _own
    if _own is None:
        _own = (_show(agent) if agent else None) or ProgressPage(bytearray(PAGE_BYTES))
        os.register_at_fork(after_in_child=_forget)
    return _own


def own_generation() -> int:
    """Return how many times the ranks of the job have formed their group again, as recorded on this process's page."""
    return 0 if _own is None else _own.generation


def own_step() -> int:
    """Return the step that this process's `phalanx.elastic.State` committed last; 0 if there is none."""
    return 0 if _own is None else _own.state_step


def _forget() -> None:
    """Give a forked child of a rank, which is not a rank itself, its own page."""
    global _own
    _own = ProgressPage(bytearray(PAGE_BYTES))


def _show(agent: str) -> ProgressPage | None:
    from phalanx._comm.symmetric_memory.memfd import memory

    try:
        with memory("phalanx-progress", PAGE_BYTES) as fd:
            page = ProgressPage(mmap.mmap(fd, PAGE_BYTES))  # written before the agent gets it
            return page if notify(agent, KIND, fds=[fd]) else None
    except (OSError, PhalanxError):  # no shared memory
        return None
