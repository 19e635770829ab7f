"""Handle a rank that makes the others wait: request its stack, report it to the user, or kill it."""

from __future__ import annotations

import signal
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx._base.processes import STACKS_SIGNAL
from phalanx._comm.diagnostics.observer import GroupLog
from phalanx._job.agent.watch import RankWatch, SuspectedRank, describe_slow, describe_wait, read_stack

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt


class SilentRanks:
    """`SilentRanks` checks the ranks of one attempt on this host every few seconds."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._watch = RankWatch(attempt.plan.settings.evict_after_s, time.monotonic())
        self.evicted: dict[int, str] = {}  # by process: why it was killed

    @property
    def due(self) -> float:
        """Return when to check next."""
        return self._watch.next_due

    def check(self, now: float) -> None:
        """Find the ranks for which others wait. Costs this process some milliseconds every few seconds."""
        attempt, watch = self._attempt, self._watch
        known = attempt.ranks.processes.pids
        pids = {rank: known[rank] for rank in sorted(known) if attempt.state.is_running(rank)}
        groups, steps_ns = attempt.flights.logs(), {pid: at for pid in pids.values() if (at := self._last_step_ns(pid))}
        if watch.is_due(now):
            for suspect in watch.check(pids, groups, steps_ns, attempt.ranks.processes.stacks, now):
                attempt.send_signal(STACKS_SIGNAL, (suspect.rank,), group=False)
            slow = watch.find_slow(now)
            rank = next((rank for rank, pid in pids.items() if slow is not None and pid == slow.pid), None)
            if slow is not None and rank is not None:
                attempt.host.display.print(describe_slow(slow, rank))
        for suspect in watch.confirm(pids, groups, steps_ns, now):
            if known.get(suspect.rank) == suspect.pid:
                self._report_or_kill(suspect, groups)

    def _last_step_ns(self, pid: int) -> int:
        """Return when the process last completed a step; 0 if it reports no steps."""
        progress = self._attempt.pages.read(pid)
        tracks = (progress.loop, progress.state) if progress is not None else ()
        return max((track.recent[-1][0] for track in tracks if track is not None), default=0)

    def _report_or_kill(self, suspect: SuspectedRank, groups: Sequence[GroupLog]) -> None:
        """Report a rank that makes the others wait, and kill it if requested."""
        attempt, evict_after_s = self._attempt, self._attempt.plan.settings.evict_after_s
        rank_of = {pid: rank for rank, pid in attempt.ranks.processes.pids.items()}
        text = describe_wait(suspect, rank_of, groups)
        stack = read_stack(attempt.ranks.processes.stacks[suspect.rank], suspect.offset)
        report = f"phalanx run: {text}" + (f"\n{textwrap.indent(stack.rstrip(), '  ')}" if stack else "")
        if not suspect.evict:
            attempt.host.display.print(f"{report}\n--evict-after SECONDS would kill it.")
            return
        why = f"the others waited for it for {suspect.silent.silent_s:.1f} s"
        if not suspect.silent.waiting:
            why = f"it was inactive for {suspect.silent.silent_s:.1f} s"
        why += f" (--evict-after {evict_after_s:g})"
        if attempt.elastic.survives_loss_of(suspect.rank, suspect.pid):
            if not attempt.elastic.is_evicted(suspect.pid):  # it was not reported before
                attempt.host.display.print(report)
            attempt.do_elastic(attempt.elastic.evict(suspect.rank, why, time.monotonic()))
        else:
            self.evicted[suspect.pid] = f"It was killed: {text} (--evict-after).\n\n{stack}".rstrip()
            attempt.send_signal(signal.SIGKILL, (suspect.rank,), group=True)
