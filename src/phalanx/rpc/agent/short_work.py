"""Do work that others order in the leader that hears of it while it is short, which saves a change of threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from phalanx.rpc.agent.serving import SHORT_S, Serving
from phalanx.rpc.agent.threads import Threads

_WEIGHT = 0.2  # the weight of work that took longer than before, in the time that the next one is expected to take


class ShortWork:
    """`ShortWork` does the work of one kind."""

    def __init__(self, serving: Serving, threads: Threads) -> None:
        self._serving = serving
        self._threads = threads
        self._took_s = math.inf  # how long the work took lately

    def run(self, work: Callable[[bool], None], may_wait: bool = False) -> None:
        """Run `work(True)` here, if it will be short and this thread leads; else `work(False)` in another thread."""
        if not may_wait and self._took_s < SHORT_S and self._serving.is_leader:
            self._serving.run_here(lambda: self._run(work, True))
        else:
            self._threads.run(lambda: self._run(work, False))

    def _run(self, work: Callable[[bool], None], is_short: bool) -> None:
        begin = time.perf_counter()
        work(is_short)
        took_s = min(time.perf_counter() - begin, 10 * SHORT_S)
        self._took_s = took_s if self._took_s > took_s else self._took_s + _WEIGHT * (took_s - self._took_s)
