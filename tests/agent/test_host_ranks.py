"""The ranks of a host: in which order what becomes of them is heard."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx._base.ipc.channel import Channel
from phalanx._job.agent import host_ranks
from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.elastic_actions import BeginGeneration, ElasticAction, GiveUp
from phalanx._job.agent.failure import Exit
from phalanx._job.agent.plan import JobPlan, Pinning
from phalanx._job.agent.settings import Settings
from phalanx._job.agent.target import JobTarget


class Decided(Attempt):
    """Does nothing of what is decided, but remembers it."""

    def __init__(self, num_ranks: int) -> None:
        plan = JobPlan(Settings(JobTarget("script", "train.py", ())), num_ranks, cast(Pinning, None), 0, {}, {}, "job")
        super().__init__(plan, cast(Any, None), 0)
        self.decided: list[ElasticAction] = []
        self.theirs: dict[int, Channel] = {}

    def do_elastic(self, actions: list[ElasticAction]) -> None:
        self.decided += actions

    def start(self, rank: int, pid: int) -> None:
        """A process that holds a line to us."""
        if rank in self.theirs:
            self.theirs[rank].close()
        ours, theirs = socket.socketpair()
        self.theirs[rank] = Channel(theirs)
        self.ranks.processes.pids[rank] = pid
        self.on_started(rank, pid)
        self.links.accept(Channel(ours), rank, pid, {"kind": "welcome"})
        self.say(rank, "elastic")
        self.receive_from_ranks()

    def say(self, rank: int, kind: str, **fields: Any) -> None:
        """The process of a rank does, and is not heard yet."""
        self.theirs[rank].put({"kind": kind, **fields})

    def lose(self, rank: int) -> None:
        self.on_exit(Exit(rank, self.ranks.processes.pids[rank], -signal.SIGKILL, 1.0))


@pytest.fixture
def ranks() -> Iterator[Decided]:
    made = Decided(3)
    yield made
    made.links.close()
    made.ranks.close()
    made.close()
    for sock in made.theirs.values():
        sock.close()


def test_who_has_said_that_it_holds_the_state_is_heard_before_the_ends_of_others(ranks: Decided) -> None:
    """An agent that has much to do takes the ends of several ranks at once. The last of those that were known to hold
    the state ended before it had read, on another line, that the one who had replaced the first did: it gave up. In a
    job that was struck a thousand times on a busy machine that came after some hundred.
    """
    for rank in range(3):
        ranks.start(rank, 100 + rank)
    ranks.lose(0)
    ranks.start(0, 200)
    ranks.say(0, "regrouped", generation=1)
    ranks.lose(1)
    ranks.lose(2)
    assert not any(isinstance(action, GiveUp) for action in ranks.decided)
    begun = [action for action in ranks.decided if isinstance(action, BeginGeneration)]
    assert [each.generation.number for each in begun] == [1, 2, 3]
    assert [sorted(each.holders) for each in begun] == [[1, 2], [0, 2], [0]]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_rank_that_another_has_lost_is_looked_for_before_its_end_is_reported(
    ranks: Decided, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports an end once it has freed the memory: until then a process that is being ended is found in
    /proc. A zombie is found there in the same way.
    """
    monkeypatch.setattr(host_ranks, "_DEVICES", ())
    host = SimpleNamespace(zygote=SimpleNamespace(wake=lambda: None), errors=SimpleNamespace(find=lambda rank: None))
    monkeypatch.setattr(ranks.ranks, "_host", host)
    monkeypatch.setattr(ranks.ranks.processes, "read_dump", lambda rank: "")
    pids = [os.fork() or signal.pause() for _ in range(3)]
    try:
        for rank, pid in enumerate(pids):
            ranks.start(rank, pid)
        os.kill(pids[1], signal.SIGKILL)
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)  # it stays a zombie
        ranks.ranks.on_time(time.monotonic())
        assert ranks.decided == [], "nobody has said that a rank is lost"
        ranks.ranks.on_reported_loss()
        ranks.ranks.on_time(time.monotonic())
        begun = [action for action in ranks.decided if isinstance(action, BeginGeneration)]
        assert [sorted(each.holders) for each in begun] == [[0, 2]]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
