"""Wait in `shutdown` until no call is in flight between any two workers.

Each worker joins a round when it is idle: none of its calls waits for an answer, and it runs no call of another worker.
A call of another worker may make it busy again, so there are several rounds. In each round every worker reports how
many calls it has made so far. When two rounds in a row have the same numbers (Mattern's counters), no worker has made a
call in between, and no call is in flight.

    worker 1   idle, "12 calls"  --->                    --->
    worker 2   idle, "3 calls"   --->  worker 0 (leads)  --->  "15 again: the end", or another round
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
from phalanx.rpc.agent.state import AgentState
from phalanx.rpc.remote_error import set_error
from phalanx.rpc.worker_info import WorkerAddress

_PAUSE_S = 0.002


class Termination:
    """`Termination` runs this worker's part of the rounds, and gathers values of all workers."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._arrived: dict[str, dict[int, tuple[Any, Future[Any]]]] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._turns: dict[str, int] = {}
        self._lost: dict[int, str] = {}
        agent.controls["gather"] = self._on_arrival
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
            PeerLostError, DeadlineError: some worker is lost, or has not called this in time.
        """
        agent = self._agent
        members = agent.membership.members()
        ranks = ranks or [one.info.id for one in members]
        leader = next(one for one in members if one.info.id == ranks[0])
        future = agent.control(leader, "gather", (key, value, tuple(ranks)), 0.0)
        done = threading.Event()
        future.on_done(lambda _: done.set())
        if leader.uid == agent.me.uid:
            self._agent.watch([one for one in members if one.info.id in ranks])
        if not done.wait(None if deadline.timeout_s > 1e8 else deadline.left_s):
            raise DeadlineError(
                f"shutdown of {agent.me}: not all workers have called it within {deadline.timeout_s:.1f} s. "
                "All of them must call shutdown; read the log of a missing one, or give it more time (timeout=)."
            )
        values: list[Any] = future.wait()
        return values

    def _on_arrival(self, member: WorkerAddress, message: tuple[str, Any, tuple[int, ...]]) -> Future[Any]:
        key, value, ranks = message
        answer: Future[Any] = Future()
        with self._lock:
            arrived = self._arrived.setdefault(key, {})
            arrived[member.info.id] = value, answer
            self._ranks[key] = ranks
        self._end(key)
        return answer

    def _end(self, key: str) -> None:
        """Answer all workers once all workers that are not lost have called `gather`."""
        with self._lock:
            arrived = self._arrived.get(key)
            if arrived is None:
                return
            ranks = self._ranks[key]
            lost = {rank: why for rank, why in self._lost.items() if rank in ranks and rank not in arrived}
            if len(arrived) + len(lost) < len(ranks):
                return
            del self._arrived[key], self._ranks[key]
        for _, answer in arrived.values():
            if lost:
                rank, why = next(iter(lost.items()))
                text = f"shutdown: the worker of rank {rank} is lost, and will not call it: {why}"
                set_error(answer, partial(PeerLostError, text, ranks=(rank,)))
            else:
                answer.set_result([arrived[rank][0] for rank in ranks])

    def _lose(self, member: WorkerAddress) -> None:
        with self._lock:
            self._lost[member.info.id] = self._agent.peer(member).lost
            keys = list(self._arrived)
        for key in keys:
            self._end(key)

    def wait_idle(self, deadline: Deadline) -> None:
        """Wait until no call of this worker is in flight, and this worker runs no call."""
        agent = self._agent
        if not deadline.wait_until(
            lambda: not (agent.num_in_flight or agent.call_limit.num_running or agent.functions.num_waiting), _PAUSE_S
        ):
            raise DeadlineError(
                f"shutdown of {agent.me}: {agent.num_in_flight} of its calls are unanswered, and it still runs "
                f"{agent.call_limit.num_running} calls of others, after {deadline.timeout_s:.1f} s."
            )

    def finish(self, deadline: Deadline) -> None:
        """Wait until no call is in flight between any two workers, and all workers have agreed on that."""
        agent = self._agent
        before: list[int] = []
        number = 0
        while True:
            self.wait_idle(deadline)
            number += 1
            try:
                counts = self.gather(f"end-{number}", agent.num_calls, deadline)
            except PeerLostError:
                agent.become(AgentState.LEAVING)  # the other workers have received the same answer
                raise
            if counts == before:
                agent.become(AgentState.LEAVING)
                return
            before = counts
