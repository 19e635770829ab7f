"""Publish the failure of a group to all its ranks, through the job's store.

    failure/<group>           the report of the first failure; the first rank to publish wins, and all report the same
    positions/<group>         a rank ran out of time, and requests all ranks' positions
    position/<group>/<rank>   the rank's answer
    known/<group>/<rank>      the rank has read the report: the process that serves the store may end
    exit/<group>/<rank>       how the rank ended and where it was, written by the rank as it exits

All calls are best effort: if the store is gone, or does not answer (if its host was cut off, torch's client would wait
for a quarter of an hour), a rank still reports its own error.
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

ServerState = Literal["ended", "hangs"]

_COLLECT_S = 0.8
_ANSWERS_PER_S = 2048  # the rate at which a store accepts answers from ranks that all answer at once
_POLL_S, _LONGEST_POLL_S = 0.02, 0.2  # polling, because torch's own wait prints warnings on a timeout
_WAIT_S = 0.1  # in a store that can wait silently
_ANSWER_S = 2.0
_LINGER_S = 5.0


class FailureStore:
    """A `FailureStore` publishes one group's failures in `store`, under keys that end in the secret `group_key`.

    `server_rank` is the rank whose process serves the store, -1 if it is not in this group; `address` is the store's
    address. `find_lost_host` returns the report of a lost host that this host's agent has written to a file.
    `find_local_report`, which a transport with shared memory sets, returns the report of a rank of this host. Neither
    waits, and both work even if the store cannot be reached.
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
        self.find_local_report: Callable[[], FailureReport | None] = lambda: None

    @property
    def is_lost(self) -> bool:
        """Return whether the store has failed to answer, so that it is not queried again."""
        return self.signals.is_store_lost

    def server_state(self) -> tuple[int, ServerState] | None:
        """Return the rank that serves the store, and its state, if the store is silent and its port shows the state.

        The port of a process that has ended is closed. The port of a stopped process is open, because the kernel
        accepts its connections. If the host does not answer either, the network may be at fault: return None.
        """
        if not self.is_lost or self._server_rank in (-1, self._rank) or self._address is None:
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
        """Return the report that a rank has published, or that a host is lost, which explains later failures."""
        return self.report_on_host() or self.signals.query(self._read, None)

    def report_on_host(self) -> FailureReport | None:
        """Return the report that this host knows without the store."""
        return self.find_lost_host() or self.find_local_report()

    def _read(self) -> FailureReport | None:
        text = self._get(f"failure/{self.group_key}")
        return FailureReport.from_json(text) if text else None

    def _get(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _position_key(self, rank: int) -> str:
        return f"position/{self.group_key}/{rank}"

    def post(self, report: FailureReport) -> FailureReport:
        """Publish `report`, unless another report was published first; return the published one."""
        report = self.find_lost_host() or report
        key = f"failure/{self.group_key}"
        mine = report.to_json()
        published: bytes = self.signals.query(lambda: self._store.compare_set(key, "", mine), b"")
        if published == mine.encode():
            self.signals.send(self.group_key)
        return FailureReport.from_json(published.decode()) if published else self.find_local_report() or report

    def await_report(self, patience_s: float) -> FailureReport | None:
        """Return the report of a rank that knows more; None if no rank publishes one within `patience_s`."""
        deadline = Deadline.after(patience_s)
        while (report := self.report()) is None and not deadline.passed:
            self._pause([f"failure/{self.group_key}"], min(deadline.left_s, _WAIT_S))
        return report

    def _pause(self, keys: list[str], longest_s: float) -> None:
        """Wait a short time; with a store that can wait silently, at most until the keys are set."""
        if self._waits_in_store and not self.is_lost:
            with contextlib.suppress(RuntimeError):
                self._store.wait(keys, timedelta(seconds=max(longest_s, 0.001)))
        else:
            time.sleep(_POLL_S)

    def acknowledge(self) -> None:
        """Confirm that this rank has read the report, if the process that serves the store waits for that."""
        if self._server_rank == -1:
            return
        self.signals.query(lambda: self._store.set(self._acknowledged_key(self._rank), ""), None)

    def linger(self, report: FailureReport) -> None:
        """Wait, at most five seconds, until the other ranks have read the report, if this process serves the store.

        Without the store, they could only report that this rank is gone.
        """
        if self._server_rank != self._rank:
            return
        others = [
            self._acknowledged_key(r) for r in range(self._world_size) if r != self._rank and r not in report.ranks
        ]
        deadline = Deadline.after(_LINGER_S)
        deadline.wait_until(
            lambda: not others or self.is_lost or self.signals.query(lambda: self._store.check(others), False), _POLL_S
        )

    def _acknowledged_key(self, rank: int) -> str:
        return f"known/{self.group_key}/{rank}"

    # -- how a rank ended ----------------------------------------------------------------------------------------

    def publish_exit_reason(self, reason: str, position: RankPosition) -> None:
        """Publish how this rank ends, and where it was."""
        text = json.dumps({"reason": reason, "position": asdict(position)})
        self.signals.query(lambda: self._store.set(f"exit/{self.group_key}/{self._rank}", text), None)

    def exit_reason(self, rank: int) -> tuple[str, RankPosition | None]:
        """Return how `rank` ended, and where it was, as it has published; "" and None if it has published nothing."""
        text = self.signals.query(lambda: self._get(f"exit/{self.group_key}/{rank}"), "")
        if not text:
            return "", None
        data = json.loads(text)
        return data["reason"], RankPosition(**data["position"])

    # -- who is where -------------------------------------------------------------------------------------------

    def collect_positions(self) -> dict[int, RankPosition]:
        """Request all ranks' positions, and wait about a second; ranks that do not answer are not in the result.

        If ranks run out of time together, the first that requests the positions collects the answers. The others wait
        for its report, which is valid for all ranks; without a report, they read the answers.
        """
        mine, key = str(self._rank), f"positions/{self.group_key}"
        requested: bytes = self.signals.query(lambda: self._store.compare_set(key, "", mine), b"")
        answers: dict[int, RankPosition] = {}
        others = [r for r in range(self._world_size) if r != self._rank]
        deadline = Deadline.after(_COLLECT_S + self._world_size / _ANSWERS_PER_S)
        if requested == mine.encode():
            self.signals.send(self.group_key)
        elif self.await_report(deadline.left_s + _COLLECT_S) is not None:
            return answers
        pause_s = _POLL_S
        while True:
            missing = [r for r in others if r not in answers]
            found: dict[int, RankPosition] = self.signals.query(partial(self._read_positions, missing), {})
            answers |= found
            if len(answers) == len(others) or deadline.passed or self.is_lost:
                return answers
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _read_positions(self, ranks: list[int]) -> dict[int, RankPosition]:
        """Return the answers of `ranks`, read in one request, or half by half if some are missing."""
        keys = [self._position_key(r) for r in ranks]
        if keys and self._store.check(keys):
            found = zip(ranks, self._store.multi_get(keys), strict=True)
            return {r: RankPosition(**json.loads(text)) for r, text in found}
        if len(ranks) <= 1:
            return {}
        middle = len(ranks) // 2
        return self._read_positions(ranks[:middle]) | self._read_positions(ranks[middle:])

    def are_positions_requested(self) -> bool:
        """Return whether a rank ran out of time, and is about to publish a report."""
        return self.signals.query(lambda: self._store.check([f"positions/{self.group_key}"]), False)

    def report_position(self, position: RankPosition) -> None:
        """Publish this rank's position, if a rank requests it and this rank has not answered yet."""
        if not self._answered and self.are_positions_requested():
            self._answered = True
            self.signals.query(
                lambda: self._store.set(self._position_key(self._rank), json.dumps(asdict(position))), None
            )
