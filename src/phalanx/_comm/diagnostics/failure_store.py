"""Through the failure store a group's ranks tell each other, in the job's store, when something goes wrong.

    failure/<group>           the report of the first failure; the first to post it wins, and all tell the same
    positions/<group>         some rank ran out of time and asks where all ranks are
    position/<group>/<rank>   its answer
    known/<group>/<rank>      it knows the report: the process that keeps the store may end
    exit/<group>/<rank>       how a rank ended and where it was, left by itself on its way out

All of it is best effort: a store that has gone, or does not answer (its host was cut off: torch's client would wait for
a quarter of an hour), does not hide what a rank saw itself.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from phalanx._base.deadline import Deadline
from phalanx._comm.diagnostics.failure_report import FailureReport
from phalanx._comm.diagnostics.failure_signals import FailureSignals
from phalanx._comm.diagnostics.flight_recorder import RankPosition

Fate = Literal["ended", "hangs"]

_COLLECT_S = 0.8
_ANSWERS_PER_S = 2048  # so many answers a second a store takes from ranks which are all asked at once
_POLL_S, _LONGEST_POLL_S = 0.02, 0.2  # asked again and again: torch's own wait prints warnings when it times out
_WAIT_S = 0.1  # in a store that can wait without a word
_ANSWER_S = 2.0
_LINGER_S = 5.0


class FailureStore:
    """One group's ranks tell each other this in `store`, under keys that end in `group_key`, which only they know.

    `server_rank` is the rank whose process serves the store, -1 where it is none of this group; `address` is where.
    `find_lost_host` asks the process on this host that knows of lost hosts; it does not wait. Nor does `told_here`,
    which a transport with shared memory sets: it returns what a rank of this host has told, also when the store can't
    be reached.
    """

    def __init__(
        self,
        store: Any,
        group_key: str,
        rank: int,
        world_size: int,
        signals: FailureSignals,
        *,
        server_rank: int = -1,
        address: tuple[str, int] | None = None,
        find_lost_host: Callable[[], FailureReport | None] = lambda: None,
        waits_in_store: bool = False,
    ) -> None:
        self._store = store
        self.group_key = group_key
        self.signals = signals
        self._waits_in_store = waits_in_store
        self._rank = rank
        self._world_size = world_size
        self._answered = False
        self._server_rank = server_rank
        self._address = address
        self.find_lost_host = find_lost_host
        self.told_here: Callable[[], FailureReport | None] = lambda: None

    @property
    def is_gone(self) -> bool:
        """Return whether the store failed to answer; it is not asked again."""
        return self.signals.is_store_gone

    def server_fate(self) -> tuple[int, Fate] | None:
        """Return the rank that kept the store, and what became of it, if the store's silence says that; else None.

        A process that has ended leaves its port closed. One that is stopped leaves it open: the kernel takes
        connections for it. Only if the host does not answer either may it be the network.
        """
        if not self.is_gone or self._server_rank in (-1, self._rank) or self._address is None:
            return None
        try:
            with socket.create_connection(self._address, timeout=_ANSWER_S):
                return self._server_rank, "hangs"
        except ConnectionRefusedError:
            return self._server_rank, "ended"
        except OSError:
            return None

    # -- the report -----------------------------------------------------------------------------------------------

    def report(self) -> FailureReport | None:
        """Return the report, if some rank has posted one, or a host is lost, which explains all that follows."""
        return self.report_here() or self.signals.ask(self._read, None)

    def report_here(self) -> FailureReport | None:
        """Return the report as far as this host knows it without the store."""
        return self.find_lost_host() or self.told_here()

    def _read(self) -> FailureReport | None:
        text = self._get(f"failure/{self.group_key}")
        return FailureReport.from_json(text) if text else None

    def _get(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _position_key(self, rank: int) -> str:
        return f"position/{self.group_key}/{rank}"

    def post(self, report: FailureReport) -> FailureReport:
        """Post `report` unless there is one; return the report that stands."""
        report = self.find_lost_host() or report
        key = f"failure/{self.group_key}"
        mine = report.to_json()
        stands: bytes = self.signals.ask(lambda: self._store.compare_set(key, "", mine), b"")
        if stands == mine.encode():
            self.signals.send(self.group_key)
        return FailureReport.from_json(stands.decode()) if stands else self.told_here() or report

    def await_report(self, patience_s: float) -> FailureReport | None:
        """Return the report of a rank that knows more, if it comes soon."""
        deadline = Deadline.after(patience_s)
        while (report := self.report()) is None and not deadline.passed:
            self._pause([f"failure/{self.group_key}"], min(deadline.left_s, _WAIT_S))
        return report

    def _pause(self, keys: list[str], longest_s: float) -> None:
        """Wait a little: until the keys are there, in a store that can wait for them without a word."""
        if self._waits_in_store and not self.is_gone:
            with contextlib.suppress(RuntimeError):
                self._store.wait(keys, timedelta(seconds=max(longest_s, 0.001)))
        else:
            time.sleep(_POLL_S)

    def acknowledge(self) -> None:
        """Say that this rank knows the report, if the process that keeps the store waits for that."""
        if self._server_rank == -1:
            return
        self.signals.ask(lambda: self._store.set(self._known(self._rank), ""), None)

    def linger(self, report: FailureReport) -> None:
        """Let the other ranks read the report, for five seconds at most, before the process goes that keeps the store.

        Without the store they could only say that this rank is gone.
        """
        if self._server_rank != self._rank:
            return
        others = [self._known(r) for r in range(self._world_size) if r != self._rank and r not in report.ranks]
        deadline = Deadline.after(_LINGER_S)
        deadline.wait_until(
            lambda: not others or self.is_gone or self.signals.ask(lambda: self._store.check(others), False), _POLL_S
        )

    def _known(self, rank: int) -> str:
        return f"known/{self.group_key}/{rank}"

    # -- how a rank ended ----------------------------------------------------------------------------------------

    def leave_exit_reason(self, reason: str, position: RankPosition) -> None:
        """Say how this rank ends, and where it was."""
        text = json.dumps({"reason": reason, "position": asdict(position)})
        self.signals.ask(lambda: self._store.set(f"exit/{self.group_key}/{self._rank}", text), None)

    def exit_reason(self, rank: int) -> tuple[str, RankPosition | None]:
        """Return what `rank` said about its end; it is empty if the rank said nothing."""
        text = self.signals.ask(lambda: self._get(f"exit/{self.group_key}/{rank}"), "")
        if not text:
            return "", None
        data = json.loads(text)
        return data["reason"], RankPosition(**data["position"])

    # -- who is where -------------------------------------------------------------------------------------------

    def collect_positions(self) -> dict[int, RankPosition]:
        """Ask all ranks where they are, and give them a moment; a rank that does not answer is not in the result.

        If ranks run out of time together, the first to ask collects the answers, and the others wait for its report,
        which stands; they read the answers if none comes.
        """
        mine, key = str(self._rank), f"positions/{self.group_key}"
        asked: bytes = self.signals.ask(lambda: self._store.compare_set(key, "", mine), b"")
        answers: dict[int, RankPosition] = {}
        others = [r for r in range(self._world_size) if r != self._rank]
        deadline = Deadline.after(_COLLECT_S + self._world_size / _ANSWERS_PER_S)
        if asked == mine.encode():
            self.signals.send(self.group_key)
        elif self.await_report(deadline.left_s + _COLLECT_S) is not None:
            return answers
        pause_s = _POLL_S
        while True:
            missing = [r for r in others if r not in answers]
            found: dict[int, RankPosition] = self.signals.ask(partial(self._read_positions, missing), {})
            answers |= found
            if len(answers) == len(others) or deadline.passed or self.is_gone:
                return answers
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _read_positions(self, ranks: list[int]) -> dict[int, RankPosition]:
        """Return what these ranks have answered, read at once, or in halves where some have not."""
        keys = [self._position_key(r) for r in ranks]
        if keys and self._store.check(keys):
            found = zip(ranks, self._store.multi_get(keys), strict=True)
            return {r: RankPosition(**json.loads(text)) for r, text in found}
        if len(ranks) <= 1:
            return {}
        middle = len(ranks) // 2
        return self._read_positions(ranks[:middle]) | self._read_positions(ranks[middle:])

    def wants_positions(self) -> bool:
        """Return whether some rank ran out of time, and is about to tell."""
        return self.signals.ask(lambda: self._store.check([f"positions/{self.group_key}"]), False)

    def report_position(self, position: RankPosition) -> None:
        """Say where this rank is, if some rank asks that and this one has not yet said so."""
        if not self._answered and self.wants_positions():
            self._answered = True
            self.signals.ask(
                lambda: self._store.set(self._position_key(self._rank), json.dumps(asdict(position))), None
            )
