"""Copy the ranks' lines from their pipes to a viewer and the log files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from phalanx._job.output.logs import Logs

_READ_BYTES = 1 << 16


class Viewer(Protocol):
    """A `Viewer` receives the ranks' lines: this command's display, or the connection to another host's."""

    @property
    def full(self) -> bool:
        """Return whether the ranks should wait."""

    def begin(self, ranks: Sequence[int]) -> None:
        """Expect output from these ranks, which start or restart."""

    def end(self, rank: int) -> None:
        """Expect no more output from this rank."""

    def show(self, rank: int, stream: int, lines: Sequence[bytes], status: bytes) -> None:
        """Show a rank's output, and the status after it."""

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
        """Add `fd`, the read end of a rank's stdout (1) or stderr (2), and own it."""
        os.set_blocking(fd, False)
        self._pipes[fd] = (rank, stream, LineSplitter())
        self.viewer.begin([rank])

    @property
    def pipes(self) -> tuple[int, ...]:
        """Return the pipes to poll; none while the viewer is full, so that the ranks wait and our memory is bounded."""
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
        lines = splitter.feed(data) if data else splitter.finish()
        self._put(rank, stream, lines, splitter.status)
        if not data:
            self._close(fd)
        return bool(data)

    def drain(self) -> None:
        """Read the rest of the pipes after all ranks have exited, close the pipes, and show all lines."""
        for fd in tuple(self._pipes):
            while self.read(fd):
                pass
            if fd in self._pipes:  # another process has the pipe open: show the output so far
                rank, stream, splitter = self._pipes[fd]
                self._put(rank, stream, splitter.finish(), b"")
                self._close(fd)
        self.viewer.flush()

    def close(self) -> None:
        """Close the pipes and the log files."""
        for fd in tuple(self._pipes):
            self._close(fd)
        self._logs.close()

    def _put(self, rank: int, stream: int, lines: list[bytes], status: bytes) -> None:
        if lines:
            problem = self._logs.put(rank, stream, lines)
            if problem:
                self.viewer.print_once("logs", problem)
        if not self._logs.shows(rank, stream):
            lines, status = [], b""
        self.viewer.show(rank, stream, lines, status)

    def _close(self, fd: int) -> None:
        rank, _, _ = self._pipes.pop(fd)
        os.close(fd)
        if not any(other == rank for other, _, _ in self._pipes.values()):
            self.viewer.end(rank)


MAX_LINE_BYTES = 1 << 20  # a longer line is split, so that memory stays bounded

# Escape codes that move the cursor or clear: they would affect other ranks' lines. Colours ("m") stay.
_MOVES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-ln-z]")


class LineSplitter:
    """A `LineSplitter` splits one stream into lines, which do not depend on the sizes of reads.

    As on a terminal, text after a carriage return overwrites the line: only the final state becomes a line, unless it
    is blank; until the line ends, its current state is `status`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._overwritten = False
        self.status = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without line ends."""
        *ended, rest = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        lines = []
        for line in ended:
            lines += self._finish(line)
        if b"\r" in rest.rstrip(b"\r"):
            self._overwritten = True
            rest = _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if self._overwritten or rest.endswith(b"\r"):
            state = _MOVES.sub(b"", _last_state(rest))
            self.status = state if state.strip() else b""
        if len(rest) > MAX_LINE_BYTES:
            lines += self._finish(rest)
            rest = b""
        self._rest = rest
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line of the ended stream if it has no line end, otherwise none."""
        rest, self._rest = self._rest, b""
        return self._finish(rest) if rest else []

    def _finish(self, line: bytes) -> list[bytes]:
        overwritten = self._overwritten or b"\r" in line.rstrip(b"\r")
        self._overwritten, self.status = False, b""
        state = _last_state(line) if b"\r" in line else line
        if b"\x1b" in state:
            state = _MOVES.sub(b"", state)
        return [] if overwritten and not state.strip() else [state]


def _last_state(line: bytes) -> bytes:
    """Return the line's content after its last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
