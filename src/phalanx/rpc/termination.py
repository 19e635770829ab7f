"""Bring all workers together at the end, when no call is under way anywhere any more.

Each worker comes when it is idle: none of its calls waits for an answer, and it runs none of others. But a call that
another one makes may make it busy again. So they come again and again, each time telling how many calls it has made so
far, until two rounds in a row have seen the same numbers (Mattern's counters): then nothing has happened in between,
and nothing is under way.

    worker 1   idle, "12 calls"  --->                    --->
    worker 2   idle, "3 calls"   --->  worker 0 (leads)  --->  "15 again: the end", or "come again"
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from torch.futures import Future

from phalanx._base.deadline import Deadline
from phalanx.errors import DeadlineError, PeerLostError
from phalanx.rpc.agent.agent import Agent
from phalanx.rpc.agent.state import State
from phalanx.rpc.remote_error import set_error
from phalanx.rpc.worker_info import WorkerAddress

_PAUSE_S = 0.002


class Termination:
    """`Termination` is this worker's part in these rounds."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._came: dict[str, dict[int, tuple[Any, Future[Any]]]] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._turns: dict[str, int] = {}
        self._lost: dict[int, str] = {}
        agent.controls["come"] = self._hear
        agent.controls["watch"] = lambda member, argument: None
        agent.on_lost.append(self._lose)

    def all_gather(self, value: Any, names: Collection[str] | None, deadline: Deadline) -> dict[str, Any]:
        """Return the values of the workers `names` (None: of all), by name, once all of them have called this."""
        members = self._agent.membership.members()
        chosen = sorted(names) if names else sorted(one.info.name for one in members)
        group = "\n".join(chosen)
        with self._lock:
            turn = self._turns[group] = self._turns.get(group, 0) + 1
        ranks = sorted(one.info.id for one in members if one.info.name in chosen)
        values = self.gather(f"{group}\n{turn}", value, deadline, ranks)
        by_rank = {one.info.id: one.info.name for one in members}
        return {by_rank[rank]: one for rank, one in zip(ranks, values, strict=True)}

    def gather(self, key: str, value: Any, deadline: Deadline, ranks: Sequence[int] = ()) -> list[Any]:
        """Return the values of all workers, or of `ranks`, by rank, once all have called this with the same `key`.

        Raises:
            PeerLostError, DeadlineError: some worker will not come, or has not in time.
        """
        agent = self._agent
        members = agent.membership.members()
        ranks = ranks or [one.info.id for one in members]
        leader = next(one for one in members if one.info.id == ranks[0])
        future = agent.control(leader, "come", (key, value, tuple(ranks)), 0.0)
        done = threading.Event()
        future.on_done(lambda _: done.set())
        if leader.uid == agent.me.uid:
            self._watch([one for one in members if one.info.id in ranks])
        if not done.wait(None if deadline.timeout_s > 1e8 else deadline.left_s):
            raise DeadlineError(
                f"shutdown of {agent.me}: not all workers have come within {deadline.timeout_s:.1f} s. "
                "All of them must call shutdown; read the log of a missing one, or give it more time (timeout=)."
            )
        values: list[Any] = future.wait()
        return values

    def _watch(self, members: Sequence[WorkerAddress]) -> None:
        """Connect to all of them: otherwise their ends would go unnoticed, and they would be waited for."""
        for one in members:
            if self._agent.peer(one).connection is None:
                self._agent.tell(one, "watch", None)

    def _hear(self, member: WorkerAddress, told: tuple[str, Any, tuple[int, ...]]) -> Future[Any]:
        key, value, ranks = told
        answer: Future[Any] = Future()
        with self._lock:
            came = self._came.setdefault(key, {})
            came[member.info.id] = value, answer
            self._ranks[key] = ranks
        self._end(key)
        return answer

    def _end(self, key: str) -> None:
        """Answer all workers when all have come that ever will."""
        with self._lock:
            came = self._came.get(key)
            if came is None:
                return
            ranks = self._ranks[key]
            lost = {rank: why for rank, why in self._lost.items() if rank in ranks and rank not in came}
            if len(came) + len(lost) < len(ranks):
                return
            del self._came[key], self._ranks[key]
        for _, answer in came.values():
            if lost:
                rank, why = next(iter(lost.items()))
                text = f"shutdown: the worker of rank {rank} is lost, and will not come: {why}"
                set_error(answer, partial(PeerLostError, text, ranks=(rank,)))
            else:
                answer.set_result([came[rank][0] for rank in ranks])

    def _lose(self, member: WorkerAddress) -> None:
        with self._lock:
            self._lost[member.info.id] = self._agent.peer(member).lost
            keys = list(self._came)
        for key in keys:
            self._end(key)

    def wait_idle(self, deadline: Deadline) -> None:
        """Wait until no call of ours is under way, and we run none."""
        agent = self._agent
        if not deadline.wait_until(
            lambda: not (agent.num_in_flight or agent.room.num_inside or agent.functions.num_waiting), _PAUSE_S
        ):
            raise DeadlineError(
                f"shutdown of {agent.me}: {agent.num_in_flight} of its calls are not answered, and it still runs "
                f"{agent.room.num_inside} of others, after {deadline.timeout_s:.1f} s."
            )

    def finish(self, deadline: Deadline) -> None:
        """Wait until nothing is under way anywhere, and all workers know."""
        agent = self._agent
        before: list[int] = []
        number = 0
        while True:
            self.wait_idle(deadline)
            number += 1
            try:
                counts = self.gather(f"end-{number}", agent.num_calls, deadline)
            except PeerLostError:
                agent.become(State.LEAVING)  # the others have heard the same
                raise
            if counts == before:
                agent.become(State.LEAVING)
                return
            before = counts
