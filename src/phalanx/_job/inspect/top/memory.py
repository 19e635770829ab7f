"""Read the memory of a process: its PSS, which divides shared pages, if the kernel reports it; otherwise its RSS."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

_AGAIN_S = 10.0
# the maximum share of time spent on reading PSS: the kernel walks all pages, and locks the process's memory map
_SHARE = 1 / 200
_KEPT = 4096


@dataclass(frozen=True)
class Memory:
    """`Memory` is the memory of a process in bytes.

    If `is_pss`, shared pages are divided among the processes that map them; otherwise they are counted in full.
    """

    num_bytes: int
    is_pss: bool


@dataclass(frozen=True)
class _Reading:
    pss: int | None
    next_s: float


class MemoryReader:
    """`MemoryReader` reads each process's PSS every ten seconds, or less often if that is slow, and caches it."""

    def __init__(self) -> None:
        self._readings: dict[int, _Reading] = {}

    def read(self, pid: int) -> Memory | None:
        """Return the memory of process `pid`; None if it has ended."""
        began_s = time.monotonic()
        reading = self._readings.get(pid)
        if reading is None or began_s >= reading.next_s:
            pss = _read_pss(pid)
            took_s = time.monotonic() - began_s
            if len(self._readings) >= _KEPT:
                self._readings.clear()
            reading = self._readings[pid] = _Reading(pss, began_s + max(_AGAIN_S, took_s / _SHARE))
        if reading.pss is not None:
            return Memory(reading.pss, True)
        rss = _read_rss(pid)
        return None if rss is None else Memory(rss, False)


def _read_pss(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # an old kernel, a process that may not be inspected, or a process that has just ended
    return None


def _read_rss(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") or None  # an ended process has none
    except (OSError, ValueError, IndexError):
        return None
