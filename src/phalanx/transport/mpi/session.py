"""An `MpiSession` surrounds each operation over MPI: the ranks agree first, and all tell one report of a failure.

MPI compares nothing, waits for ever and does not say for whom. So the ranks first gather each other's fingerprints, and
say where they are when one of them runs out of time:

    every rank   gather all fingerprints     if they differ, every rank knows every rank's call
    on timeout   ask for all positions       each rank that waits or computes tells its own; then it says goodbye, with
                                             the report, and all who receive it raise the same
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.deadline import Deadline
from phalanx.diagnostics.failure_report import (
    LEFT,
    LEFT_IN_FLIGHT,
    FailureReport,
    Operation,
    closed,
)
from phalanx.diagnostics.flight_recorder import Position
from phalanx.engines.mpi import EngineClosed, MpiEngine, PeerLeft, TimedOut, Underway
from phalanx.engines.mpi.polling import wait_until
from phalanx.transport.base import CallContext
from phalanx.transport.call import Call, Disagreement
from phalanx.transport.engine_session import EngineSession

_COLLECT_S = 0.5


class MpiSession(EngineSession):
    """An `MpiSession` is one rank's side of a group over MPI. `names` are the ranks' processes: 'pid 17 on node3'.

    It runs one collective at a time, and holds `lock` meanwhile.
    """

    def __init__(self, group: str, engine: MpiEngine, names: Sequence[str]) -> None:
        super().__init__(group, engine.rank, engine.world_size, names)
        self._engine = engine
        self._mpi = engine.runtime.mpi
        self._answers: dict[int, Position] = {}
        self._exit_reason = LEFT
        engine.on_control_message = self._receive_control

    # -- what the process group asks -----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return (self._engine.is_closed and self._report is None) or self._engine.runtime.is_over

    def set_exit_reason(self, exit_reason: str) -> None:
        self._exit_reason = exit_reason

    def leave_in_flight(self) -> None:
        """Wake the operations of this process that still run."""
        self._exit_reason = LEFT_IN_FLIGHT
        self.close()

    def close(self) -> None:
        self._engine.close(seq=self._seq, exit_reason=self._exit_reason, position=asdict(self._where()))

    # -- around a collective -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _collective(self, call: Call, ctx: CallContext) -> Iterator[Deadline]:
        """Agree on `call` with all ranks; what fails inside becomes the error that all ranks tell.

        Raises:
            MismatchError: some rank called something else; no tensor was changed.
            PeerLostError, DeadlineError: a rank left or is late.
        """
        with self.lock, self._running(call, ctx) as deadline:
            yield deadline

    @contextlib.contextmanager
    def _reporting(self, operation: Operation, deadline: Deadline, peer: int | None = None) -> Iterator[None]:
        try:
            yield
        except Disagreement as error:
            remarks = (
                () if error.is_collective else ("the tensor may hold the beginning of it",)
            )  # MPI has begun to write
            self._report = FailureReport(
                "mismatch", calls=error.calls, is_collective=error.is_collective, remarks=remarks
            )
        except TimedOut:
            self._report = self._report or self._explain_late(deadline.timeout_s, peer)
        except PeerLeft as error:
            self._report = self._lost(error.peer, error.message, peer)
        except EngineClosed:
            if self._report is None:
                raise closed(self.group) from None
        except self._mpi.Exception as error:
            self._report = FailureReport("broken", reason=f"MPI failed: {error}")
        except BaseException as error:
            self._interrupted(error)
            raise
        else:
            return
        self._engine.close(seq=self._seq, report=self._report.to_json())
        raise self._report.error(operation) from None

    def _interrupted(self, error: BaseException) -> None:
        """Tell the peers that Ctrl-C, or a signal handler that raised, ended the wait."""
        self._report = self._report_interrupted(type(error).__name__, self._where())
        self._engine.close(seq=self._seq, report=self._report.to_json())

    def _gather_heads(self, mine: bytearray, heads: bytearray, deadline: Deadline) -> None:
        byte = self._mpi.BYTE
        self._run(lambda comm: comm.Iallgather([mine, byte], [heads, byte]), (mine, heads), deadline)

    def _run(self, start: Callable[[Any], Any], memory: Any, deadline: Deadline) -> None:
        """Carry out one of MPI's collectives, which uses `memory`."""
        self._finish(self._engine.begin(lambda: start(self._engine.comm), memory), deadline)

    def _finish(self, operation: Underway, deadline: Deadline) -> None:
        operation.finish(deadline.left_s, self._look)

    def _look(self) -> None:
        """Raise if a rank has left that did not come this far."""
        for peer, message in list(self._engine.departed.items()):
            if message["seq"] < self._seq or "report" in message:
                raise PeerLeft(peer, message)

    # -- reports -------------------------------------------------------------------------------------------------

    def _receive_control(self, src: int, message: dict[str, Any]) -> None:
        """Take a message of another rank; the thread that listens calls this."""
        if message["kind"] == "positions":
            with contextlib.suppress(RuntimeError):
                self._engine.send_control({"kind": "position", **asdict(self._where())}, [src])
        elif message["kind"] == "position":
            del message["kind"]
            self._answers[src] = Position(**message)

    def _lost(self, who: int, message: dict[str, Any], peer: int | None) -> FailureReport:
        """Report that `who` has left, with `message` as its goodbye. `peer` is given where a message was waited for,
        and not a collective.
        """
        if "report" in message:
            return FailureReport.from_json(message["report"])
        return self._report_lost(who, message["exit_reason"], peer, Position(**message["position"]))

    def _explain_late(self, timeout_s: float, peer: int | None) -> FailureReport:
        with contextlib.suppress(RuntimeError):
            self._engine.send_control({"kind": "positions"})
            wait_until(lambda: len(self._answers) == len(self._others), lambda: None, _COLLECT_S)
        for r, message in list(self._engine.departed.items()):  # somebody was faster
            if "report" in message:
                return self._lost(r, message, peer)
        return self._report_late(self._answers, timeout_s, peer)
