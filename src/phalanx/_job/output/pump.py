"""Copy the ranks' lines from their pipes to a viewer and the log files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx._job.output.logs import Logs

_READ_BYTES = 1 << 16


class Viewer(Protocol):
    """A `Viewer` receives the ranks' lines: this command's display, or the connection to the first host's display."""

    @property
    def full(self) -> bool:
        """Return whether the ranks should wait, because too much output is queued."""

    def begin(self, ranks: Sequence[int]) -> None:
        """Expect output from these ranks, which are starting or restarting."""

    def end(self, rank: int) -> None:
        """Expect no more output from this rank."""

    def show(self, rank: int, stream: int, lines: Sequence[bytes], status: bytes) -> None:
        """Show a rank's output, then `status`: the lines that are still being redrawn, joined by line ends."""

    def print_once(self, what: str, text: str) -> None:
        """Print `text`, once for each `what`."""

    def flush(self) -> None:
        """Show all pending lines now."""


class Pump:
    """A `Pump` owns the ranks' pipes, and writes their lines to `viewer` and `logs`."""

    def __init__(self, viewer: Viewer, logs: Logs) -> None:
        self.viewer = viewer
        self._logs = logs
        self._pipes: dict[int, tuple[int, int, LineSplitter]] = {}  # descriptor -> rank, stream, splitter

    def add(self, rank: int, stream: int, fd: int) -> None:
        """Add `fd`, the read end of a rank's stdout (1) or stderr (2), which the pump owns from now on."""
        os.set_blocking(fd, False)
        self._pipes[fd] = (rank, stream, LineSplitter())
        self.viewer.begin([rank])

    @property
    def pipes(self) -> tuple[int, ...]:
        """Return the pipes to poll; none while the viewer is full, so that the ranks wait and memory stays bounded."""
        return () if self.viewer.full else tuple(self._pipes)

    def read(self, fd: int, before_it: Callable[[], object] = lambda: None) -> bool:
        """Read once from a pipe; return False if the pipe is empty or has ended.

        `before_it` is called between reading and processing the bytes, to process earlier messages of the rank on
        other channels. The pipe moves to the end of `pipes`, so that a caller that reads only some pipes is fair.
        """
        rank, stream, splitter = self._pipes[fd] = self._pipes.pop(fd)
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        before_it()
        lines = splitter.feed(data, time.monotonic()) if data else splitter.finish()
        self._put(rank, stream, lines, splitter)
        if not data:
            self._close(fd)
        return bool(data)

    @property
    def next_due(self) -> float | None:
        """Return when `show_due` must next be called; None for never."""
        times = [at for fd in self.pipes if (at := self._pipes[fd][2].due) is not None]
        return min(times, default=None)

    def show_due(self, before_it: Callable[[], object] = lambda: None) -> None:
        """Show redrawn and unfinished lines that have waited long enough. `before_it` is as in `read`."""
        now = time.monotonic()
        for fd in self.pipes:
            rank, stream, splitter = self._pipes[fd]
            is_due = splitter.due is not None and splitter.due <= now
            if is_due and not self.read(fd, before_it) and fd in self._pipes:
                self._put(rank, stream, splitter.release(now), splitter)
                if text := splitter.show_partial(now):
                    self._show(rank, stream, [text], splitter.status)

    def drain(self) -> None:
        """Read the rest of the pipes after all ranks have exited, close the pipes, and show all lines."""
        for fd in tuple(self._pipes):
            while self.read(fd):
                pass
            if fd in self._pipes:  # another process has the pipe open: show the output so far
                rank, stream, splitter = self._pipes[fd]
                self._put(rank, stream, splitter.finish(), splitter)
                self._close(fd)
        self.viewer.flush()

    def close(self) -> None:
        """Close the pipes and the log files."""
        for fd in tuple(self._pipes):
            self._close(fd)
        self._logs.close()

    def _put(self, rank: int, stream: int, lines: list[bytes], splitter: LineSplitter) -> None:
        if lines:
            problem = self._logs.put(rank, stream, lines)
            if problem:
                self.viewer.print_once("logs", problem)
        self._show(rank, stream, splitter.drop_shown(lines), splitter.status)

    def _show(self, rank: int, stream: int, lines: list[bytes], status: bytes) -> None:
        if not self._logs.shows(rank, stream):
            lines, status = [], b""
        self.viewer.show(rank, stream, lines, status)

    def _close(self, fd: int) -> None:
        rank, _, _ = self._pipes.pop(fd)
        os.close(fd)
        if not any(other == rank for other, _, _ in self._pipes.values()):
            self.viewer.end(rank)


MAX_LINE_BYTES = 1 << 20  # a longer line is split, so that memory stays bounded
# how long a redrawn line waits after its end, as the cursor may move back; progress bars do within microseconds
REDRAW_S = 0.1
PARTIAL_S = 1.0  # how long a line without its end waits for more output before its text is shown
_MAX_ROWS = 64  # maximum number of lines that wait above the cursor

# Escape codes that move the cursor or erase text: they would affect other ranks' lines. Colours ("m") are kept.
_MOVES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-ln-z]")
_UP = b"\x1b[A"


@dataclass
class _Row:
    """A `_Row` is a line above the cursor, which can be redrawn until `due`."""

    text: bytes
    overwritten: bool
    due: float


class LineSplitter:
    """A `LineSplitter` splits one stream into lines, in the same way however the reads divide the stream.

    As on a terminal, text after a carriage return overwrites the line: only the final state becomes a line, unless it
    is blank; until the line ends, its current state is `status`. Nested progress bars are redrawn below one another:

        epoch  10%         above: was redrawn or is blank, and has ended; the cursor may return until `due`
        batch  45%_        at the cursor
        part   80%         below: drawn before the cursor moved up

    Plain text without a line end is shown after `PARTIAL_S` without output. The delay doubles with each part of
    the same line.
    """

    def __init__(self) -> None:
        self._above: list[_Row] = []
        self._rest = b""
        self._escape = b""  # the beginning of an escape code whose end was not read yet
        self._overwritten = False
        self._below: list[bytes] = []
        self.status = b""
        self._shown = b""  # the part of the unfinished line that was already shown
        self._partial_s = PARTIAL_S
        self._partial_due: float | None = None

    @property
    def due(self) -> float | None:
        """Return when to call `release` and `show_partial`; None for never."""
        return self._above[0].due if self._above else self._partial_due

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that are complete after `data`, without line ends."""
        data = self._escape + data
        self._escape = next((cut for cut in (b"\x1b", b"\x1b[") if data.endswith(cut)), b"")
        data = data.removesuffix(self._escape)
        lines: list[bytes] = []
        if not (self._above or self._below or self._overwritten or re.search(rb"[\r\x1b]", self._rest + data)):
            *lines, data = (self._rest + data).split(b"\n")  # plain text, which need not be processed line by line
            while lines and not lines[-1].strip() and len(self._above) < _MAX_ROWS:
                self._above.insert(0, _Row(lines.pop(), False, now + REDRAW_S))
            self._rest = b""
        first, *others = data.split(b"\n")
        self._write(first)
        for text in others:
            lines += self._end_line(now)
            self._write(text)
        rest = self._rest
        if b"\r" in rest.rstrip(b"\r"):
            self._overwritten = True
            self._shown = b""
            self._rest = rest = _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if len(rest) > MAX_LINE_BYTES:
            lines += self._finish_above() + _finish(rest, self._overwritten)
            self._rest, self._overwritten = b"", False
        is_plain = bool(self._rest) and not self._overwritten and b"\r" not in self._rest
        if lines:
            self._partial_s = PARTIAL_S  # another line has begun
        self._partial_due = now + self._partial_s if is_plain else None
        return lines + self.release(now)

    def release(self, now: float) -> list[bytes]:
        """Return the lines above the cursor that are due."""
        lines = self._finish_above(sum(row.due <= now for row in self._above))
        self._update_status()
        return lines

    def show_partial(self, now: float) -> bytes:
        """Return the text of the unfinished line that is due and was not shown; empty if there is none."""
        if self._partial_due is None or now < self._partial_due:
            return b""
        self._partial_due = None
        line = _MOVES.sub(b"", self._rest)
        text = line.removeprefix(self._shown)
        if text.strip():
            self._shown, self._partial_s = line, 2 * self._partial_s
        return text if text.strip() else b""

    def drop_shown(self, lines: list[bytes]) -> list[bytes]:
        """Return the new `lines` without the text that `show_partial` has returned."""
        if not lines:
            return lines
        text, shown = lines[0].removeprefix(self._shown), self._shown
        self._shown = b""
        return [text, *lines[1:]] if text or not shown else lines[1:]

    def finish(self) -> list[bytes]:
        """Return the remaining lines of a stream that has ended: those without a line end, and those that waited."""
        rest = self._rest + self._escape
        lines = self._finish_above() + (_finish(rest, self._overwritten) if rest else [])
        lines += [line for text in self._below for line in _finish(text, True)]
        self._rest, self._escape, self._overwritten, self._below, self.status = b"", b"", False, [], b""
        return lines

    def _write(self, text: bytes) -> None:
        """Write `text`, which has no line end, at the cursor."""
        rest = self._rest + text
        if _UP in rest:
            rest, *others = rest.split(_UP)
            for text in others:
                if self._above:
                    self._below.insert(0, _last_state(rest))
                    row = self._above.pop()
                    rest, self._overwritten = row.text, row.overwritten
                rest += text
        self._rest = rest

    def _end_line(self, now: float) -> list[bytes]:
        """Move the cursor to the next line; return the lines that are complete."""
        line, overwritten = self._rest, self._overwritten or b"\r" in self._rest.rstrip(b"\r")
        if overwritten:
            self._shown = b""
        # Text that is already below the cursor stays until it is overwritten.
        self._rest = self._below.pop(0) + b"\r" if self._below else b""
        self._overwritten = bool(self._rest.strip())
        if not self._overwritten:
            self._rest = b""
        if not overwritten and line.strip():
            return self._finish_above() + _finish(line, overwritten)
        self._above.append(_Row(line, overwritten, now + REDRAW_S))
        return self._finish_above(len(self._above) - _MAX_ROWS)

    def _finish_above(self, count: int = _MAX_ROWS) -> list[bytes]:
        """Return the first `count` rows above the cursor as lines."""
        done, self._above = self._above[: max(0, count)], self._above[max(0, count) :]
        return [line for row in done for line in _finish(row.text, row.overwritten)]

    def _update_status(self) -> None:
        rows = [row.text for row in self._above]
        if self._overwritten or self._rest.endswith(b"\r"):
            rows.append(self._rest)
        self.status = b"\n".join(line for text in (*rows, *self._below) for line in _finish(text, True))


def _finish(line: bytes, overwritten: bool) -> list[bytes]:
    """Return the final state of a line, or nothing if it was overwritten by blanks."""
    state = _last_state(line) if b"\r" in line else line
    if b"\x1b" in state:
        state = _MOVES.sub(b"", state)
    return [] if overwritten and not state.strip() else [state]


def _last_state(line: bytes) -> bytes:
    """Return the line's content after its last carriage return, without trailing ones."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
