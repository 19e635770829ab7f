"""A `StopVote` makes all ranks stop after the same step, no matter which rank is asked to stop, or when.

asked, on any rank ──▶ a vote, on all ranks ──▶ agreed: stop after this step
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from phalanx import elastic
from phalanx.checkpoint.peers import Peers
from phalanx.strategies import Strategy

_NOTHING, _STOP, _PREEMPTED = range(3)  # requests to a rank, the strongest last
_EVERY_S = 0.1
_MOST_STEPS = 16


class StopVote:
    """`StopVote` collects requests from a signal handler, a callback or another thread, and votes with all ranks.

    Cost: an all-reduce of 16 bytes, on the CPU if the group supports it, about every 0.1 s: after each step that takes
    longer than that, and after every 16th step if steps take less than 6 ms.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._requested = self._agreed = _NOTHING, ""
        self._last = 0, time.monotonic()  # the step and the time of the last vote

    @property
    def reason(self) -> str:
        """Return why this rank was asked to stop; empty if it was not."""
        return self._requested[1]

    @property
    def is_preempted(self) -> bool:
        """Return whether the ranks have agreed to stop because of a SIGTERM."""
        return self._agreed[0] == _PREEMPTED

    @property
    def has_sigterm(self) -> bool:
        """Return whether this rank has received SIGTERM, and should skip optional work."""
        return self._requested[0] == _PREEMPTED

    def request(self, reason: str) -> None:
        """Request a stop at the next vote; the latest reason counts."""
        self._requested = max(self._requested[0], _STOP), reason

    @contextlib.contextmanager
    def handling_sigterm(self) -> Iterator[None]:
        """Treat SIGTERM as a request to stop, unless the script handles it, or this is not the main thread.

        A SIGTERM that came too late for a vote is raised again at the end.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.has_sigterm and not self.is_preempted:
                signal.raise_signal(signal.SIGTERM)

    def _on_sigterm(self, *_: Any) -> None:
        self._requested = _PREEMPTED, "SIGTERM"

    def is_due(self, state: elastic.State) -> bool:
        """Return whether a vote follows this step, with the same answer on all ranks."""
        return self._strategy.is_in_step and state.step >= state.next_vote

    def vote(self, state: elastic.State) -> None:
        """Vote, and set `state.why_stopped` if a rank was asked to stop. All ranks call it.

        All ranks keep the result, so that they agree again if a rank is lost before the end.
        """
        group, mine = self._strategy.training_group, max(self._requested, self._agreed, key=lambda asked: asked[0])
        if group is None:
            self._agreed = mine
        else:
            peers = Peers(group, what="a vote on whether to stop")
            votes = torch.tensor([mine[0], -self._plan_interval(state.step)], device=peers.device)
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
            strongest, interval = votes.tolist()
            state.next_vote = state.step - interval
            if strongest != _NOTHING:
                self._agreed = max(peers.all_gather(mine), key=lambda asked: asked[0])
        if self._agreed[0] != _NOTHING:
            state.why_stopped = self._agreed[1]

    def _plan_interval(self, step: int) -> int:
        """Return the number of steps after which this rank would vote again."""
        (last, at), now = self._last, time.monotonic()
        self._last = step, now
        return plan_interval(step - last, now - at)


def plan_interval(num_steps: int, elapsed_s: float) -> int:
    """Return the number of steps until the next vote, given that `num_steps` took `elapsed_s`."""
    if num_steps <= 0 or elapsed_s <= 0:
        return 1
    return min(max(int(_EVERY_S * num_steps / elapsed_s), 1), _MOST_STEPS)
