"""`Display` shows the ranks' lines here: folded, with their ranks in front, and status lines on a terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence

from phalanx._job.output.fold import Folder
from phalanx._job.output.held_tracebacks import HeldTracebacks
from phalanx._job.output.screen import CLEAR_BELOW, format_prefix, plan_status
from phalanx._job.output.text import encode
from phalanx._job.output.writer import Writer

_REDRAW_S = 0.05  # a status line is redrawn at most this often


class Display:
    """It queues lines for this command's own stdout and stderr, and writes what goes without waiting.

    `host_of` names the host of some ranks, for jobs on several: empty where they are on more than one.
    """

    def __init__(
        self, *, colour: bool, terminal: bool, host_of: Callable[[Iterable[int]], str] = lambda ranks: ""
    ) -> None:
        self._out = Writer(1)
        # one queue serves both if they lead to the same place, so that nothing overtakes there
        self._err = self._out if os.path.sameopenfile(1, 2) else Writer(2)
        self._colour = colour
        self._terminal = terminal
        self.host_of = host_of
        self.prefix_of: Callable[[int], str] | None = None  # the prefix as the user wants it; then no lines are folded
        self._folder = Folder(())
        self._statuses: dict[tuple[int, int], bytes] = {}  # rank, stream -> what it shows until its end
        self._drawn = 0
        self._redraw_at: float | None = None
        self._redrawn_at = 0.0
        self._prefixes: dict[frozenset[int], bytes] = {}
        self._held = HeldTracebacks()
        self._told: set[str] = set()  # what cannot be written is said once

    def begin(self, ranks: Iterable[int]) -> None:
        """Begin with these ranks, which print from now on, or again; they may be on another host than before."""
        self._folder.begin(ranks)
        self._prefixes.clear()

    def end(self, rank: int) -> None:
        self._folder.end(rank)
        for stream in (1, 2):
            self._statuses.pop((rank, stream), None)

    @property
    def full(self) -> bool:
        """Return whether so much waits to be written that nothing more should come."""
        return self._out.full or self._err.full

    @property
    def writers(self) -> tuple[Writer, ...]:
        """Return the writers that have something to write."""
        return tuple(writer for writer in {self._out, self._err} if writer.waiting)

    @property
    def reader_gone(self) -> bool:
        """Return whether nothing reads our stdout any more."""
        return self._out.broken

    @property
    def lost(self) -> OSError | None:
        """Return why some of the ranks' lines could not be written to our stdout (a full disk); None if all could."""
        return self._out.problem

    @property
    def next_due(self) -> float | None:
        """Return when `tick` is next needed; None if it is not."""
        times = [at for at in (self._folder.next_due, self._redraw_at) if at is not None]
        return min(times, default=None)

    def show(self, rank: int, stream: int, lines: Sequence[bytes], status: bytes) -> None:
        """Show that `rank` has printed `lines` to its stdout (1) or stderr (2), followed by `status`."""
        if stream == 2:
            lines = self._held.feed(rank, lines)
        now = time.monotonic()
        for line in lines:
            self._folder.add(rank, stream, line, now)
        if not self._terminal:
            return
        if status:
            self._statuses[rank, stream] = status
        else:
            self._statuses.pop((rank, stream), None)
        if (status or self._drawn) and self._redraw_at is None:
            self._redraw_at = max(now, self._redrawn_at + _REDRAW_S)

    def tick(self) -> None:
        """Show the lines and the status that are due."""
        now = time.monotonic()
        self._show_lines(now)
        if self._redraw_at is not None and self._redraw_at <= now:
            self._draw_status()
        for writer in self.writers:
            writer.write_some()
        if self._out.problem is not None:
            self.say_once(
                "stdout",
                f"phalanx run: stdout cannot be written: {self._out.problem.strerror}. The job goes on; lines are lost "
                "until there is room again, and the exit code will not be 0.",
            )

    def flush(self) -> None:
        self._show_lines(float("inf"))

    def say(self, text: str) -> None:
        """Show the agent's own words, on stderr, behind all lines so far."""
        self._show_lines(float("inf"))
        self._clear_status()
        self._err.put(encode(text) + b"\n")

    def say_once(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.say(text)

    def expect(self, rank: int, traceback: str, *, quiet: bool = False) -> None:
        """Keep back `traceback`, which `rank` is about to print, for good if `quiet`. The log files get it."""
        self._held.expect(rank, traceback, quiet=quiet)

    def release(self) -> None:
        """Show the tracebacks that were kept back."""
        now = time.monotonic()
        for rank, line in self._held.release():
            self._folder.add(rank, 2, line, now)

    def forget(self) -> None:
        """Let go of the lines that are still kept back, since they were told."""
        self._held.forget()

    def _show_lines(self, now: float) -> None:
        lines = self._folder.release(now)
        if not lines:
            return
        self._clear_status()
        for line in lines:
            ranks = frozenset(line.ranks)
            prefixes = (
                [self._prefix(ranks)] if self.prefix_of is None else map(encode, map(self.prefix_of, sorted(ranks)))
            )
            for prefix in prefixes:
                (self._out if line.stream == 1 else self._err).put(prefix + line.text + b"\n")
        if self._terminal:
            self._draw_status()

    def _prefix(self, ranks: frozenset[int]) -> bytes:
        if ranks not in self._prefixes:
            self._prefixes[ranks] = format_prefix(ranks, colour=self._colour, host=self.host_of(ranks))
        return self._prefixes[ranks]

    def _draw_status(self) -> None:
        self._redraw_at = None
        self._redrawn_at = time.monotonic()
        self._clear_status()
        states = [(rank, status) for (rank, _), status in self._statuses.items()]
        if not states:
            return
        columns, rows = os.get_terminal_size(1)
        lines = plan_status(sorted(states), columns=columns, rows=rows, colour=self._colour)
        self._out.put(b"\n".join(lines))
        self._drawn = len(lines)

    def _clear_status(self) -> None:
        if self._drawn:
            up = b"\x1b[%dA" % (self._drawn - 1) if self._drawn > 1 else b""
            self._out.put(up + CLEAR_BELOW)
            self._drawn = 0
