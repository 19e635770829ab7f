"""Fold identical lines of several ranks into one, and keep each rank's own order.

rank 0:  a  b  c            pending, in order of release:
rank 1:  a     c            a {0,1}   b {0}   c {0,1}
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW_S = 0.1  # how long a line waits for its twins; ranks in step print within a few milliseconds
_MAX_PENDING = 4096


@dataclass
class Folded:
    """A `Folded` is a line, the stream it came from (1 or 2), and the ranks that printed it."""

    stream: int
    text: bytes
    ranks: set[int]
    due: float
    order: int


class _Twins:
    """These are pending lines of one text, in order. A step is one binary search, even for 100,000 blank lines."""

    def __init__(self) -> None:
        self.lines: list[Folded] = []
        self._first = 0  # the lines before it were released

    def find_behind(self, order: int) -> Folded | None:
        """Return the first line that stands behind `order`."""
        at = bisect_right(self.lines, order, lo=self._first, key=lambda line: line.order)
        return self.lines[at] if at < len(self.lines) else None

    def drop_first(self) -> None:
        """Note that the first line was released: it is always the first, because lines are released in order."""
        self._first += 1
        if 2 * self._first >= len(self.lines):
            del self.lines[: self._first]
            self._first = 0


class Folder:
    """A folder holds lines until all live ranks have printed them, or for `window_s`. Time is an argument."""

    def __init__(self, ranks: Iterable[int], window_s: float = WINDOW_S) -> None:
        self._live = set(ranks)
        self._window_s = window_s
        self._pending: deque[Folded] = deque()
        self._waiting: dict[tuple[int, bytes], _Twins] = {}
        self._last: dict[int, int] = {}  # rank -> order of its latest line: its next may join only behind that
        self._order = 0

    def add(self, rank: int, stream: int, text: bytes, now: float) -> None:
        twins = self._waiting.get((stream, text))
        if twins is None:
            twins = self._waiting[stream, text] = _Twins()
        twin = twins.find_behind(self._last.get(rank, -1))
        if twin is not None:
            twin.ranks.add(rank)
            self._last[rank] = twin.order
            return
        self._order += 1
        entry = Folded(stream, text, {rank}, now + self._window_s, self._order)
        twins.lines.append(entry)
        self._pending.append(entry)
        self._last[rank] = self._order

    def end(self, rank: int) -> None:
        """Note that `rank` will print nothing more, so no line waits for it."""
        self._live.discard(rank)

    def begin(self, ranks: Iterable[int]) -> None:
        """Begin again with ranks that print again (after a restart)."""
        self._live |= set(ranks)

    def release(self, now: float) -> list[Folded]:
        """Return the lines that are due, in order: all live ranks printed them, or they have waited long enough."""
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

    def flush(self) -> list[Folded]:
        return self.release(float("inf"))

    @property
    def next_due(self) -> float | None:
        """Return when `release` will next have something to do by time alone; None when nothing is pending."""
        return self._pending[0].due if self._pending else None
