"""Show the ranks' lines on this command's output: folded, prefixed with their ranks, and followed by status lines."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from phalanx._job.output.logs import explain_gap
from phalanx._job.output.screen import CLEAR_BELOW, format_prefix, plan_status
from phalanx._job.output.standard import encode
from phalanx._job.output.traceback_buffer import TracebackBuffer

_REDRAW_S = 0.05  # a status line is redrawn at most this often


class Display:
    """A `Display` queues lines for this command's stdout and stderr, and writes without blocking.

    `host_of` returns the host of ranks that are all on one host of a job on several; otherwise an empty string.
    """

    def __init__(
        self, *, colour: bool, terminal: bool, host_of: Callable[[Iterable[int]], str] = lambda ranks: ""
    ) -> None:
        self._out = Writer(1)
        # one queue for both if they are the same file, so that lines stay in order
        self._err = self._out if os.path.sameopenfile(1, 2) else Writer(2)
        self._colour = colour
        self._terminal = terminal
        self.host_of = host_of
        self.prefix_of: Callable[[int], str] | None = None  # the user's prefix; if set, each rank gets its own line
        self._folder = LineFolder(())
        self._statuses: dict[tuple[int, int], bytes] = {}  # rank, stream -> the lines to show, joined by line ends
        self._drawn = 0
        self._redraw_at: float | None = None
        self._redrawn_at = 0.0
        self._prefixes: dict[frozenset[int], bytes] = {}
        self._tracebacks = TracebackBuffer()
        self._printed_once: set[str] = set()  # the texts that `print_once` has printed

    def begin(self, ranks: Iterable[int]) -> None:
        """Expect output from these ranks, which start or restart, perhaps on another host than before."""
        self._folder.begin(ranks)
        self._prefixes.clear()

    def end(self, rank: int) -> None:
        self._folder.end(rank)
        for stream in (1, 2):
            self._statuses.pop((rank, stream), None)

    @property
    def full(self) -> bool:
        """Return whether so much output is queued that no more should be accepted."""
        return self._out.full or self._err.full

    @property
    def writers(self) -> tuple[Writer, ...]:
        """Return the writers with queued output."""
        return tuple(writer for writer in {self._out, self._err} if writer.waiting)

    @property
    def reader_gone(self) -> bool:
        """Return whether the reader of our stdout has closed it."""
        return self._out.broken

    @property
    def lost(self) -> OSError | None:
        """Return why lines on our stdout were lost, such as a full disk; None if no line was lost."""
        return self._out.problem

    @property
    def next_due(self) -> float | None:
        """Return when `tick` must next be called; None for never."""
        times = [at for at in (self._folder.next_due, self._redraw_at) if at is not None]
        return min(times, default=None)

    def show(self, rank: int, stream: int, lines: Sequence[bytes], status: bytes) -> None:
        """Show `lines`, which `rank` has printed to its stdout (1) or stderr (2), and the `status` after them."""
        if stream == 2:
            lines = self._tracebacks.feed(rank, lines)
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
        """Queue the lines and the status that are due, and write without blocking."""
        now = time.monotonic()
        self._show_lines(now)
        if self._redraw_at is not None and self._redraw_at <= now:
            self._draw_status()
        for writer in self.writers:
            writer.write_some()
        if self._out.problem is not None:
            self.print_once(
                "stdout",
                f"phalanx run: stdout cannot be written: {self._out.problem.strerror}. The job continues; lines are "
                "lost until there is room again, and the exit code will not be 0.",
            )

    def flush(self) -> None:
        self._show_lines(float("inf"))

    def close(self) -> None:
        """Close the writers; unwritten output is dropped."""
        for writer in {self._out, self._err}:
            writer.close()

    def print(self, text: str) -> None:
        """Print a text from the agent to stderr, after all earlier lines of the ranks."""
        self._show_lines(float("inf"))
        self._clear_status()
        self._err.put(encode(text) + b"\n")

    def print_once(self, what: str, text: str) -> None:
        if what not in self._printed_once:
            self._printed_once.add(what)
            self.print(text)

    def expect(self, rank: int, traceback: str, *, quiet: bool = False) -> None:
        """Buffer `traceback`, which `rank` is about to print, until `release`; if `quiet`, never show it.

        Log files get the traceback in any case.
        """
        self._tracebacks.expect(rank, traceback, quiet=quiet)

    def has_same(self, traceback: str) -> bool:
        """Return whether another rank has reported this traceback, perhaps with other numbers."""
        return self._tracebacks.has_same(traceback)

    def hide(self, rank: int) -> None:
        """Never show the buffered traceback of `rank`, because the traceback was reported."""
        self._tracebacks.hide(rank)

    def release(self) -> None:
        """Show the buffered tracebacks."""
        now = time.monotonic()
        for rank, line in self._tracebacks.release():
            self._folder.add(rank, 2, line, now)

    def forget(self) -> None:
        """Drop the buffered tracebacks, because they were reported."""
        self._tracebacks.forget()

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
            if len(self._prefixes) >= _MAX_PREFIXES:  # many ranks print in ever new combinations
                self._prefixes.clear()
            self._prefixes[ranks] = format_prefix(ranks, colour=self._colour, host=self.host_of(ranks))
        return self._prefixes[ranks]

    def _draw_status(self) -> None:
        self._redraw_at = None
        self._redrawn_at = time.monotonic()
        self._clear_status()
        states = [(key[0], line) for key, status in sorted(self._statuses.items()) for line in status.split(b"\n")]
        if not states:
            return
        try:
            columns, rows = os.get_terminal_size(1)
        except OSError:  # the terminal was closed
            return
        lines = plan_status(states, columns=columns, rows=rows, colour=self._colour)
        self._out.put(b"\n".join(lines))
        self._drawn = len(lines)

    def _clear_status(self) -> None:
        if self._drawn:
            up = b"\x1b[%dA" % (self._drawn - 1) if self._drawn > 1 else b""
            self._out.put(up + CLEAR_BELOW)
            self._drawn = 0


# Fold identical lines from several ranks into one, and keep the order of each rank's lines.
#
# rank 0:  a  b  c            pending, in order of release:
# rank 1:  a     c            a {0,1}   b {0}   c {0,1}

WINDOW_S = 0.1  # how long a line waits for identical lines; ranks in step print them within milliseconds
_MAX_PENDING = 4096
_MAX_PREFIXES = 1024


@dataclass
class FoldedLine:
    """A `FoldedLine` is a line, the stream it came from (1 or 2), and the ranks that printed it."""

    stream: int
    text: bytes
    ranks: set[int]
    due: float
    order: int


class _EqualLines:
    """`_EqualLines` are the pending lines with one text, in order.

    Searches are binary, because 100,000 pending lines may be blank.
    """

    def __init__(self) -> None:
        self.lines: list[FoldedLine] = []
        self._first = 0  # the first line that was not released

    def find_after(self, order: int) -> FoldedLine | None:
        """Return the first line after `order`."""
        at = bisect_right(self.lines, order, lo=self._first, key=lambda line: line.order)
        return self.lines[at] if at < len(self.lines) else None

    def drop_first(self) -> None:
        """Drop the first line, which was released."""
        self._first += 1
        if 2 * self._first >= len(self.lines):
            del self.lines[: self._first]
            self._first = 0


class LineFolder:
    """A `LineFolder` buffers each line until all live ranks have printed it, or for `window_s`. It uses no clock."""

    def __init__(self, ranks: Iterable[int], window_s: float = WINDOW_S) -> None:
        self._live = set(ranks)
        self._window_s = window_s
        self._pending: deque[FoldedLine] = deque()
        self._waiting: dict[tuple[int, bytes], _EqualLines] = {}
        self._last: dict[int, int] = {}  # rank -> order of its latest line; its next line must follow
        self._order = 0

    def add(self, rank: int, stream: int, text: bytes, now: float) -> None:
        twins = self._waiting.get((stream, text))
        if twins is None:
            twins = self._waiting[stream, text] = _EqualLines()
        twin = twins.find_after(self._last.get(rank, -1))
        if twin is not None:
            twin.ranks.add(rank)
            self._last[rank] = twin.order
            return
        self._order += 1
        entry = FoldedLine(stream, text, {rank}, now + self._window_s, self._order)
        twins.lines.append(entry)
        self._pending.append(entry)
        self._last[rank] = self._order

    def end(self, rank: int) -> None:
        """Stop waiting for `rank`, which prints no more."""
        self._live.discard(rank)

    def begin(self, ranks: Iterable[int]) -> None:
        """Wait for these ranks, which start or restart."""
        self._live |= set(ranks)

    def release(self, now: float) -> list[FoldedLine]:
        """Return the lines, in order, that all live ranks have printed, or that cannot wait any longer."""
        released = []
        while self._pending:
            head = self._pending[0]
            if not (self._live <= head.ranks or head.due <= now or len(self._pending) > _MAX_PENDING):
                break
            self._pending.popleft()
            key = (head.stream, head.text)
            twins = self._waiting[key]
            twins.drop_first()
            if not twins.lines:
                del self._waiting[key]
            released.append(head)
        return released

    @property
    def next_due(self) -> float | None:
        """Return when the next line is due; None if none is pending."""
        return self._pending[0].due if self._pending else None


_PIECE_BYTES = 4096  # PIPE_BUF: a writable pipe accepts this many bytes without blocking


class Writer:
    """A `Writer` is a queue of bytes in front of a descriptor: a terminal, a pipe or a file.

    No write blocks, so Ctrl-C works while the reader does not read. The user's shell shares the descriptor, which must
    therefore stay in blocking mode: a terminal is opened again, and a pipe is written in small pieces.
    """

    LIMIT_BYTES = 1 << 20

    def __init__(self, fd: int) -> None:
        self.fd = self._shared = fd
        if os.isatty(fd):  # unlike a pipe, a terminal counts as writable as soon as one byte fits
            with suppress(OSError):  # the terminal belongs to another user (su), or is outside this container
                self.fd = os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        self.broken = False  # the reader has closed the pipe, or the terminal is gone
        self.problem: OSError | None = None  # why lines were lost; later lines may be written
        self._gap = False
        self._queue = bytearray()

    @property
    def waiting(self) -> bool:
        """Return whether output is queued."""
        return bool(self._queue)

    @property
    def full(self) -> bool:
        """Return whether so much is queued that no more should be read from the ranks."""
        return len(self._queue) > self.LIMIT_BYTES

    def put(self, data: bytes) -> None:
        """Queue `data`; drop it if the pipe or the terminal is `broken`."""
        if self.broken:
            return
        if self._gap and not self._queue:
            self._queue += explain_gap(self.problem)
        self._queue += data

    def write_some(self) -> None:
        """Write as much as possible without blocking."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self._queue and poll.poll(0):
            try:
                written = os.write(self.fd, self._queue[:_PIECE_BYTES])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EIO) and not stat.S_ISREG(os.fstat(self.fd).st_mode):
                    self.broken = True  # EPIPE: the reader has closed it; EIO: the terminal is gone
                else:
                    self.problem, self._gap = error, True  # a full disk may have room later
                self._queue.clear()
                return
            self._gap = False
            del self._queue[:written]

    def close(self) -> None:
        """Close the terminal, if it was opened again."""
        if self.fd != self._shared:
            os.close(self.fd)
