"""Measure what other programs took of this process's cores while something was measured."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


class Load:
    """It counts from its construction on. The time of child processes counts as ours once they have been waited for."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = root / "proc/stat"
        self._began = time.monotonic()
        self._busy, self._own = self._busy_seconds(), _own_seconds()

    def others(self) -> float | None:
        """Return how many cores' worth of time other programs took since, of the cores that we may use; None if it is
        not known.

        Time that a virtual machine was not given counts as theirs.
        """
        busy, own = self._busy_seconds(), _own_seconds()
        elapsed = time.monotonic() - self._began
        if busy is None or self._busy is None or elapsed <= 0.0:
            return None
        return max(0.0, (busy - self._busy - (own - self._own)) / elapsed)

    def _busy_seconds(self) -> float | None:
        if not hasattr(os, "sched_getaffinity"):
            return None
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines()]
        except OSError:
            return None
        ticks = 0
        for name, *numbers in (words for words in lines if words and words[0] in cores):
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = (*map(int, numbers), *[0] * 8)
            ticks += user + nice + system + irq + softirq + steal
            cores.discard(name)
        return None if cores else ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
