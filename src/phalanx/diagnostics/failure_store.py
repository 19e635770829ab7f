"""What the ranks of a group tell each other through the job's store when something goes wrong.

    failure/<meeting>         the report of the first failure; the first to post it wins, and all tell the same
    roll/<meeting>            some rank ran out of time and asks where everybody is
    here/<meeting>/<rank>     its answer
    heard/<meeting>/<rank>    it knows the report: whoever keeps the store may go
    note/<meeting>/<rank>     how a rank ended, left by itself on its way out

All of it is best effort: a store that has gone, or does not answer (its host was cut off: torch's client would wait
for a quarter of an hour), does not hide what a rank saw with its own eyes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from phalanx.deadline import Deadline
from phalanx.errors import DeadlineError, MismatchError, PeerLostError, PhalanxError

T = TypeVar("T")
Fate = Literal["ended", "hangs"]

OVER = "The group can no longer be used."
_ROLL_CALL_S = 0.8
_GLANCE_S = 0.02  # asked again and again: torch's own wait prints warnings when it times out
_ANSWER_S = 2.0
_LINGER_S = 5.0


@dataclass(frozen=True)
class FailureReport:
    """Why the group is over: what a message says after naming the operation and the rank."""

    kind: Literal["mismatch", "lost", "late", "broken"]
    text: str
    ranks: tuple[int, ...] = ()
    calls: Mapping[int, str] = field(default_factory=dict)

    def error(self, here: str) -> PhalanxError:
        """The error for the rank that is `here`."""
        message = f"{here}: {self.text} {OVER}"
        if self.kind == "mismatch":
            return MismatchError(message, calls=self.calls)
        if self.kind == "lost":
            return PeerLostError(message, ranks=self.ranks)
        if self.kind == "late":
            return DeadlineError(message, missing=self.ranks)
        return PhalanxError(message)

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FailureReport:
        """The opposite of `to_json`."""
        data = json.loads(text)
        calls = {int(r): call for r, call in data["calls"].items()}
        return cls(data["kind"], data["text"], tuple(data["ranks"]), calls)


@dataclass(frozen=True)
class Position:
    """Where a rank is: in its `seq`-th operation, or (`inside` false) past it."""

    seq: int
    inside: bool
    text: str


class FailureStore:
    """The board of one group. `meeting` is a word that only this group's ranks know.

    `keeper` is the rank whose process keeps the store, -1 where it is none of this group, and `address` where it does.
    """

    def __init__(
        self,
        store: Any,
        meeting: str,
        rank: int,
        world_size: int,
        *,
        keeper: int = -1,
        address: tuple[str, int] | None = None,
    ) -> None:
        self._store = store
        self._meeting = meeting
        self._rank = rank
        self._world_size = world_size
        self._answered = False
        self._gone = False
        self._keeper = keeper
        self._address = address

    @property
    def is_gone(self) -> bool:
        """Whether the store failed to answer; it is not asked again."""
        return self._gone

    def keeper_fate(self) -> tuple[int, Fate] | None:
        """The rank that kept the store, and what became of it, where the store's silence says that; else None.

        A process that has ended leaves its port closed. One that is stopped leaves it open: the kernel takes
        connections for it. Only where the host does not answer either may it be the network.
        """
        if not self._gone or self._keeper in (-1, self._rank) or self._address is None:
            return None
        try:
            with socket.create_connection(self._address, timeout=_ANSWER_S):
                return self._keeper, "hangs"
        except ConnectionRefusedError:
            return self._keeper, "ended"
        except OSError:
            return None

    def _try(self, ask: Callable[[], T], default: T) -> T:
        if self._gone:
            return default
        answers: list[T] = []
        asking = threading.Thread(target=self._ask, args=(ask, answers), name="phalanx-bulletin", daemon=True)
        asking.start()
        asking.join(_ANSWER_S)
        self._gone = not answers
        return answers[0] if answers else default

    @staticmethod
    def _ask(ask: Callable[[], T], answers: list[T]) -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    # -- the report -----------------------------------------------------------------------------------------------

    def report(self) -> FailureReport | None:
        """The story, if somebody has told one."""
        return self._try(self._read, None)

    def _read(self) -> FailureReport | None:
        text = self._get(f"failure/{self._meeting}")
        return FailureReport.from_json(text) if text else None

    def _get(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _here(self, rank: int) -> str:
        return f"here/{self._meeting}/{rank}"

    def post(self, report: FailureReport) -> FailureReport:
        """Tell `report` unless there is one; returns the one that stands."""
        key = f"failure/{self._meeting}"
        stands: bytes = self._try(lambda: self._store.compare_set(key, "", report.to_json()), b"")
        return FailureReport.from_json(stands.decode()) if stands else report

    def await_report(self, patience_s: float) -> FailureReport | None:
        """The story of somebody who knows more, if it comes soon."""
        deadline = Deadline.after(patience_s)
        while (report := self.report()) is None and not deadline.passed:
            time.sleep(_GLANCE_S)
        return report

    def mark_heard(self) -> None:
        """Say that this rank knows the report."""
        self._try(lambda: self._store.set(self._heard(self._rank), ""), None)

    def linger(self, report: FailureReport) -> None:
        """Before the process goes that keeps the store: let the others read there why, for five seconds at most.

        Without the store they could only say that this rank is gone.
        """
        if self._keeper != self._rank:
            return
        heard = [self._heard(r) for r in range(self._world_size) if r != self._rank and r not in report.ranks]
        deadline = Deadline.after(_LINGER_S)
        while heard and not deadline.passed and not self._gone:
            if self._try(lambda: self._store.check(heard), False):
                return
            time.sleep(_GLANCE_S)

    def _heard(self, rank: int) -> str:
        return f"heard/{self._meeting}/{rank}"

    # -- how a rank ended ----------------------------------------------------------------------------------------

    def leave_note(self, note: str) -> None:
        """Say how this rank ends."""
        self._try(lambda: self._store.set(f"note/{self._meeting}/{self._rank}", note), None)

    def note_of(self, rank: int) -> str:
        """What `rank` said about its end, or nothing."""
        return self._try(lambda: self._get(f"note/{self._meeting}/{rank}"), "")

    # -- who is where -------------------------------------------------------------------------------------------

    def collect_positions(self) -> dict[int, Position]:
        """Ask all ranks where they are, and give them a moment; whoever does not answer is not in the result."""
        self._try(lambda: self._store.set(f"roll/{self._meeting}", str(self._rank)), None)
        others = [r for r in range(self._world_size) if r != self._rank]
        answers: dict[int, Position] = {}
        deadline = Deadline.after(_ROLL_CALL_S)
        while len(answers) < len(others) and not (deadline.passed or self._gone):
            time.sleep(_GLANCE_S)
            for r in others:
                if r not in answers and (text := self._try(partial(self._get, self._here(r)), "")):
                    answers[r] = Position(**json.loads(text))
        return answers

    def wants_positions(self) -> bool:
        """Whether some rank ran out of time, and is about to tell."""
        return self._try(lambda: self._store.check([f"roll/{self._meeting}"]), False)

    def report_position(self, position: Position) -> None:
        """If somebody asks where we are and we have not yet said so, say it."""
        if not self._answered and self._store.check([f"roll/{self._meeting}"]):
            self._answered = True
            self._store.set(self._here(self._rank), json.dumps(asdict(position)))
