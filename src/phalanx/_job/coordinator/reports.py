"""`Reports` stores the members' reports for others to read: failures, flight records. When full, it refuses more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

MAX_REPORTS = 1024  # the most reports of one sender
MAX_SENDER_BYTES = 32 << 20
MAX_BYTES = 1 << 30


class Reports:
    """`Reports` has reports by kind, in the order in which they arrived."""

    def __init__(self) -> None:
        self._by_kind: dict[bytes, list[tuple[int, bytes]]] = {}
        self._counts: Counter[int] = Counter()
        self._sizes: Counter[int] = Counter()

    def add(self, sender: int, kind: bytes, body: bytes) -> bool:
        """Store a report; return False if its sender, or all members together, have sent too much."""
        size = len(kind) + len(body)
        full = (
            self._counts[sender] >= MAX_REPORTS
            or self._sizes[sender] + size > MAX_SENDER_BYTES
            or self._sizes.total() + size > MAX_BYTES
        )
        if not full:
            self._counts[sender] += 1
            self._sizes[sender] += size
            self._by_kind.setdefault(kind, []).append((sender, body))
        return not full

    def __iter__(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield the kind, sender and body of each report."""
        for kind, reports in self._by_kind.items():
            for sender, body in reports:
                yield kind, sender, body

    def page(self, kind: bytes, start: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """Return the reports of a kind from number `start` on, as many as fit in `max_bytes`, but at least one."""
        found: list[tuple[int, bytes]] = []
        size = 0
        for sender, body in self._by_kind.get(kind, [])[max(start, 0) :]:
            size += len(body)
            if found and size > max_bytes:
                break
            found.append((sender, body))
        return found
