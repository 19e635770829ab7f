"""From the ranks' pipes to the terminal and the log files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from phalanx.launch.output.echo import Echo
from phalanx.launch.output.fold import Folder
from phalanx.launch.output.lines import LineSplitter
from phalanx.launch.output.logs import LogFile
from phalanx.launch.output.screen import CLEAR_BELOW, format_prefix, plan_status
from phalanx.launch.output.text import encode
from phalanx.launch.output.writer import Writer

_READ_BYTES = 1 << 16
_REDRAW_S = 0.05  # a status line is redrawn at most this often


class Pump:
    """Reads the ranks' pipes when told that they are ready, and queues what is to be seen."""

    def __init__(self, num_ranks: int, *, log_dir: str | None, colour: bool, terminal: bool) -> None:
        self._out = Writer(1)
        # one queue when both lead to the same place, so that nothing overtakes there
        self._err = self._out if os.path.sameopenfile(1, 2) else Writer(2)
        self._colour = colour
        self._terminal = terminal
        self._folder = Folder(range(num_ranks))
        self._pipes: dict[int, tuple[int, int, LineSplitter]] = {}  # descriptor -> rank, stream, splitter
        self._drawn = 0
        self._redraw_at: float | None = None
        self._redrawn_at = 0.0
        self._prefixes: dict[frozenset[int], bytes] = {}
        self._logs: list[LogFile] = []
        self._echoes: dict[int, Echo] = {}  # rank -> what it is about to print and was told to us already
        self._told: set[str] = set()  # what cannot be written, said once
        if log_dir is not None:
            os.makedirs(log_dir, exist_ok=True)
            self._logs = [LogFile(os.path.join(log_dir, f"rank_{rank}.log")) for rank in range(num_ranks)]

    def add(self, rank: int, stream: int, fd: int) -> None:
        """Take over the reading end `fd` of a rank's stdout (1) or stderr (2)."""
        os.set_blocking(fd, False)
        self._pipes[fd] = (rank, stream, LineSplitter())
        self._folder.begin([rank])

    @property
    def pipes(self) -> tuple[int, ...]:
        """What to wait on; none while our own output is held up, so that the ranks wait rather than we swell."""
        return () if self._out.full or self._err.full else tuple(self._pipes)

    @property
    def writers(self) -> tuple[Writer, ...]:
        """Those that have something to write."""
        return tuple(writer for writer in {self._out, self._err} if writer.waiting)

    @property
    def reader_gone(self) -> bool:
        """Whether nobody reads our stdout any more."""
        return self._out.broken

    @property
    def lost(self) -> OSError | None:
        """Why some of the ranks' lines could not be written to our stdout (a full disk); None if all could."""
        return self._out.problem

    @property
    def next_due(self) -> float | None:
        """When `tick` is next needed; None for not at all."""
        times = [at for at in (self._folder.next_due, self._redraw_at) if at is not None]
        return min(times, default=None)

    def read(self, fd: int, before_it: Callable[[], object] = lambda: None) -> bool:
        """Read what is there, once; False when there was nothing (the pipe is empty or has ended).

        `before_it` is called when the bytes are here and before they count: for what the rank told elsewhere earlier.
        The pipe goes to the end of `pipes`: who reads only some of them in a turn is fair to all.
        """
        rank, stream, splitter = self._pipes[fd] = self._pipes.pop(fd)
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        before_it()
        lines = splitter.feed(data) if data else splitter.finish()
        status = splitter.status
        self._take(rank, stream, lines)
        if not data:
            self._close(fd)
        if self._terminal and (status or self._drawn) and self._redraw_at is None:
            self._redraw_at = max(time.monotonic(), self._redrawn_at + _REDRAW_S)
        return bool(data)

    def tick(self) -> None:
        """Show the lines and the status that are due."""
        now = time.monotonic()
        self._show_lines(now)
        if self._redraw_at is not None and self._redraw_at <= now:
            self._draw_status()
        for writer in self.writers:
            writer.write_some()
        if self._out.problem is not None:
            self._tell(
                "stdout",
                f"phalanx run: stdout cannot be written: {self._out.problem.strerror}. The job goes on; lines are lost "
                "until there is room again, and the exit code will not be 0.",
            )

    def drain(self) -> None:
        """Everything has ended: read what the pipes still hold, close them, queue all lines."""
        for fd in tuple(self._pipes):
            while self.read(fd):
                pass
            if fd in self._pipes:  # held open by somebody who is not ours: what it wrote so far is shown
                rank, stream, splitter = self._pipes[fd]
                self._take(rank, stream, splitter.finish())
                self._close(fd)
        self._show_lines(float("inf"))

    def say(self, text: str) -> None:
        """The agent's own words, on stderr, behind all lines so far."""
        self._show_lines(float("inf"))
        self._clear_status()
        self._err.put(encode(text) + b"\n")

    def expect(self, rank: int, traceback: str) -> None:
        """`rank` is about to print `traceback`: keep it back. The log files get it."""
        self._echoes.setdefault(rank, Echo(encode(traceback)))

    def release(self, first: int | None) -> None:
        """Show what was kept back, except of rank `first`, which will be told at the end, and what is equal to that."""
        told = self._echoes[first].text if first in self._echoes else None
        now = time.monotonic()
        for rank, echo in list(self._echoes.items()):
            if echo.text != told:
                for line in echo.release():
                    self._folder.add(rank, 2, line, now)
                del self._echoes[rank]

    def forget(self) -> None:
        """What is still kept back was told."""
        self._echoes.clear()

    def close(self) -> None:
        """Close pipes and log files."""
        for fd in tuple(self._pipes):
            self._close(fd)
        for log in self._logs:
            log.close()

    def _take(self, rank: int, stream: int, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._logs:
            log = self._logs[rank]
            log.put(lines)
            if log.problem is not None:
                self._tell(
                    "logs",
                    f"phalanx run: --log-dir: cannot write {log.path}: {log.problem.strerror}. The job goes on; lines "
                    "are missing in the logs until they can be written again.",
                )
        if stream == 2 and rank in self._echoes:
            lines = [shown for line in lines for shown in self._echoes[rank].feed(line)]
        now = time.monotonic()
        for line in lines:
            self._folder.add(rank, stream, line, now)

    def _tell(self, what: str, text: str) -> None:
        """Say `text`, once for each `what`."""
        if what not in self._told:
            self._told.add(what)
            self.say(text)

    def _show_lines(self, now: float) -> None:
        lines = self._folder.release(now)
        if not lines:
            return
        self._clear_status()
        for line in lines:
            prefix = self._prefix(frozenset(line.ranks))
            (self._out if line.stream == 1 else self._err).put(prefix + line.text + b"\n")
        if self._terminal:
            self._draw_status()

    def _prefix(self, ranks: frozenset[int]) -> bytes:
        if ranks not in self._prefixes:
            self._prefixes[ranks] = format_prefix(ranks, colour=self._colour)
        return self._prefixes[ranks]

    def _draw_status(self) -> None:
        self._redraw_at = None
        self._redrawn_at = time.monotonic()
        self._clear_status()
        states = [(rank, splitter.status) for rank, _, splitter in self._pipes.values() if splitter.status]
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

    def _close(self, fd: int) -> None:
        rank, _, _ = self._pipes.pop(fd)
        os.close(fd)
        if not any(other == rank for other, _, _ in self._pipes.values()):
            self._folder.end(rank)
