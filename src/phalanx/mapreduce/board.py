"""The `Board` assigns map tasks to idle ranks, one at a time, through the store.

    claim        the next task that no rank has begun                 add next
    running      has another rank completed it first?                 check done/TASK
    done         the first result counts                              add done/TASK == 1
    idle         tasks that failed elsewhere; tasks of a dead rank;
                 tasks that take longer than usual (stragglers)       add runs/TASK

Every rank polls the store itself: there is no master whose loss would end the job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.mapreduce.team import Team

_POLL_S = 0.1
_MIN_WAIT_S = 0.2


@dataclass(frozen=True)
class OpenTask:
    """An `OpenTask` is an unfinished task as an idle rank sees it."""

    task: int
    runs: int
    failures: int
    failed_here: bool
    ran_here: bool
    for_s: float  # how long this rank has been idle while the task was unfinished


def choose_idle_task(open_tasks: Sequence[OpenTask], world_size: int, wait_s: float) -> int | None:
    """Return the task that an idle rank should run; None if it has to wait.

    A failed task that no rank is repeating comes first; if possible, a rank where it has not failed repeats it. Then
    comes the straggling task with the fewest runs.
    """
    for one in open_tasks:
        if one.failures and one.failures >= one.runs and (not one.failed_here or one.failures >= world_size):
            return one.task
    late = [one for one in open_tasks if one.for_s >= wait_s and not one.ran_here]
    return min(late, key=lambda one: (one.runs, one.task)).task if late else None


@dataclass
class Board:
    """A `Board` is one rank's view of the map tasks, which are numbered from 0."""

    team: Team
    prefix: str
    num_tasks: int
    _done: set[int] = field(default_factory=set)
    _failed_here: set[int] = field(default_factory=set)
    _ran_here: set[int] = field(default_factory=set)
    _next_poll: float = 0.0
    _idle_since: float = 0.0
    _took_s: list[float] = field(default_factory=list)
    num_backups: int = 0
    cause: BaseException | None = None  # the cause of the problem that this rank has published

    def _key(self, *words: object) -> str:
        return "/".join([self.prefix, *map(str, words)])

    def claim(self) -> int | None:
        """Begin the next task that no rank has begun, and return it; None if there is none."""
        store = self.team.store
        task = store.add(self._key("next"), 1) - 1
        return self.begin(task) if task < self.num_tasks else None

    def begin(self, task: int) -> int:
        """Record that this rank begins the task, and return the task."""
        self._ran_here.add(task)
        number = self.team.store.add(self._key("runs", task), 1)
        self.team.store.set(self._key("run", task, number), str(self.team.rank))
        self._next_poll = time.monotonic() + _POLL_S
        return task

    def is_open(self, task: int) -> bool:
        """Return whether no rank has completed the task and the job has not failed; poll the store at most every 0.1 s.

        Raises:
            PeerLostError: a rank has ended.
        """
        now = time.monotonic()
        if now < self._next_poll:
            return True
        self._next_poll = now + _POLL_S
        self.team.check_peers()
        return not self._is_done(task) and self.problem() is None

    def finish(self, task: int, seconds: float) -> bool:
        """Record that this rank has completed the task, and return whether it was the first."""
        self._took_s.append(seconds)
        self._done.add(task)
        return self.team.store.add(self._key("done", task), 1) == 1

    def fail(self, task: int, text: str) -> int:
        """Record that the task failed here, and return how often it has failed on all ranks."""
        self._failed_here.add(task)
        number = self.team.store.add(self._key("failures", task), 1)
        self.team.store.set(self._key("failure", task, number), json.dumps([self.team.rank, text]))
        return number

    def failures(self, task: int) -> list[tuple[int, str]]:
        """Return each failure of a task: the rank and the error."""
        keys = [self._key("failure", task, number + 1) for number in range(self._count("failure", task))]
        return [tuple(json.loads(self.team.store.get(key))) for key in keys]

    def _count(self, kind: str, task: int) -> int:
        """Return a count without changing the store: a waiting rank polls often, and a FileStore keeps all changes."""
        count = 0
        while self.team.store.check([self._key(kind, task, count + 1)]):
            count += 1
        return count

    def fail_job(self, kind: str, text: str, cause: BaseException | None = None) -> None:
        """Publish to all ranks that the job has failed. The error of the first rank to publish counts."""
        self.cause = cause
        if self.team.store.add(self._key("given-up"), 1) == 1:
            self.team.store.set(self._key("problem"), json.dumps([self.team.rank, kind, text]))
        self.team.wait_until(lambda: self.problem() is not None)  # the first rank may be about to publish it

    def problem(self) -> tuple[int, str, str] | None:
        """Return the rank, kind and text of the job's failure; None if it has not failed."""
        key = self._key("problem")
        if not self.team.store.check([key]):
            return None
        rank, kind, text = json.loads(self.team.store.get(key))
        return rank, kind, text

    def _is_done(self, task: int) -> bool:
        if task not in self._done and self.team.store.check([self._key("done", task)]):
            self._done.add(task)
        return task in self._done

    def find_idle(self) -> int | None:
        """Wait until this rank should repeat a task, and begin it; return None if all are done or the job has failed.

        Raises:
            PeerLostError: a rank has ended.
        """
        self._idle_since = time.monotonic()
        wait_s = max(_MIN_WAIT_S, sum(self._took_s) / len(self._took_s) if self._took_s else 1.0)
        found: list[int] = []

        def poll() -> bool:
            left = [task for task in range(self.num_tasks) if not self._is_done(task)]
            if not left or self.problem() is not None:
                return True
            choice = choose_idle_task([self._open_task(task) for task in left], self.team.size, wait_s)
            if choice is not None:
                found.append(choice)
            return choice is not None

        self.team.wait_until(poll)
        if not found:
            return None
        self.num_backups += found[0] not in self._failed_here
        return self.begin(found[0])

    def _open_task(self, task: int) -> OpenTask:
        return OpenTask(
            task,
            self._count("run", task),
            self._count("failure", task),
            task in self._failed_here,
            task in self._ran_here,
            time.monotonic() - self._idle_since,
        )
