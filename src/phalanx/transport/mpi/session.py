"""Around every collective over MPI: agree before data moves, and end with one report when something goes wrong.

MPI compares nothing, waits for ever and does not say for whom. So the ranks first gather each other's fingerprints, and
say where they are when one of them runs out of time:

    every rank   gather all fingerprints     they differ: every rank knows every rank's call
    on timeout   ask for all positions       whoever waits, or computes, answers where it is; then it says goodbye, with
                                             the report, and all who receive it raise the same
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from phalanx.deadline import Deadline
from phalanx.diagnostics.call_sites import short
from phalanx.diagnostics.divergence import describe_left_alone
from phalanx.diagnostics.failure_report import (
    LEFT,
    LEFT_IN_FLIGHT,
    FailureReport,
    Operation,
    closed,
    ended_well,
)
from phalanx.diagnostics.flight_recorder import Position
from phalanx.engines.mpi import EngineClosed, MpiEngine, PeerLeft, TimedOut, Underway
from phalanx.engines.mpi.polling import wait_until
from phalanx.transport.base import CallContext, Transport
from phalanx.transport.call import HEAD_BYTES, Call, Disagreement, disagreement, split_heads

_COLLECT_S = 0.5


class MpiSession(Transport):
    """One rank's side of a group over MPI. `names` is how people call each rank's process: 'pid 17 on node3'.

    One collective at a time: `lock` is held while it runs.
    """

    def __init__(self, group: str, engine: MpiEngine, names: Sequence[str]) -> None:
        self.group = group
        self.rank = engine.rank
        self.world_size = engine.world_size
        self.lock = threading.Lock()
        self._seq = 0
        self._engine = engine
        self._mpi = engine.runtime.mpi
        self._names = tuple(names)
        self._sites: list[str] = [""]
        self._position = Position()
        self._entered_s = 0.0
        self._answers: dict[int, Position] = {}
        self._report: FailureReport | None = None
        self._exit_reason = LEFT
        engine.on_control_message = self._receive_control

    # -- what the process group asks -----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether this process has left."""
        return (self._engine.is_closed and self._report is None) or self._engine.runtime.is_over

    @property
    def seq(self) -> int:
        """How many collectives this rank has begun."""
        return self._seq

    def call_site(self, place: tuple[str, int]) -> int:
        """A number for a (file, line)."""
        text = f"{short(place[0])}:{place[1]}" if place[0] else ""
        if text not in self._sites:
            self._sites.append(text)
        return self._sites.index(text)

    def set_exit_reason(self, exit_reason: str) -> None:
        """How this process ends, for those who will miss it."""
        self._exit_reason = exit_reason

    def leave_in_flight(self) -> None:
        """Operations are still running here: wake them."""
        self._exit_reason = LEFT_IN_FLIGHT
        self.close()

    def close(self) -> None:
        """Leave. Whoever waits for this rank hears it at once."""
        self._engine.close(seq=self.seq, exit_reason=self._exit_reason, position=asdict(self._where()))

    # -- around a collective -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _collective(self, call: Call, ctx: CallContext) -> Iterator[Deadline]:
        """Agree on `call` with all ranks; what fails inside becomes the error that all ranks tell.

        Raises:
            MismatchError: some rank called something else; no tensor was changed.
            PeerLostError, DeadlineError: a rank left or is late.
        """
        with self.lock, torch.no_grad():
            self._check_open(Operation(call.name, self.group, self.rank, call_site=call.place))
            self._seq += 1
            operation = Operation(f"{call.name} #{self._seq}", self.group, self.rank, self._seq, call.place)
            self._entered_s = time.monotonic()
            self._position = Position(self._seq, operation.place, inside=True)
            deadline = Deadline.after(ctx.timeout_s)
            with self._reporting(operation, deadline):
                self._agree(call, deadline)
                yield deadline
            self._position = Position(self.seq, operation.place)

    def _check_open(self, operation: Operation) -> None:
        if self.closed:
            raise closed(self.group)
        if self._report is not None:
            raise self._report.error(operation)

    def _where(self) -> Position:
        """Where this rank is now."""
        position = self._position
        return replace(position, seconds=time.monotonic() - self._entered_s) if position.inside else position

    @contextlib.contextmanager
    def _reporting(self, operation: Operation, deadline: Deadline, peer: int | None = None) -> Iterator[None]:
        """Turn what fails inside into the error that all ranks raise. `peer`: only it is waited for, below zero any."""
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
            self._report = self._report or self._late(deadline.timeout_s, peer)
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
        self._engine.close(seq=self.seq, report=self._report.to_json())
        raise self._report.error(operation) from None

    def _interrupted(self, error: BaseException) -> None:
        """Ctrl-C, or a signal handler that raised, ended the wait: the peers should hear why."""
        me = self.rank
        positions = {me: self._where()}
        reason = type(error).__name__
        self._report = FailureReport("interrupted", (me,), self._processes(me), positions, reason=reason)
        self._engine.close(seq=self.seq, report=self._report.to_json())

    def _agree(self, call: Call, deadline: Deadline) -> None:
        mine = bytearray(call.head(self.seq))
        heads = bytearray(HEAD_BYTES * self.world_size)
        byte = self._mpi.BYTE
        self._run(lambda comm: comm.Iallgather([mine, byte], [heads, byte]), (mine, heads), deadline)
        if calls := disagreement(split_heads(bytes(heads), range(self.world_size)), self.seq):
            raise Disagreement(calls)

    def _run(self, start: Callable[[Any], Any], memory: Any, deadline: Deadline) -> None:
        """Carry out one of MPI's collectives, which uses `memory`."""
        self._finish(self._engine.begin(lambda: start(self._engine.comm), memory), deadline)

    def _finish(self, operation: Underway, deadline: Deadline) -> None:
        operation.finish(deadline.left_s, self._look)

    def _look(self) -> None:
        """Raise if a rank has left that did not come this far."""
        for peer, message in list(self._engine.departed.items()):
            if message["seq"] < self.seq or "report" in message:
                raise PeerLeft(peer, message)

    # -- reports -------------------------------------------------------------------------------------------------

    def _receive_control(self, src: int, message: dict[str, Any]) -> None:
        """Called by the thread that listens."""
        if message["kind"] == "positions":
            with contextlib.suppress(RuntimeError):
                self._engine.send_control({"kind": "position", **asdict(self._where())}, [src])
        elif message["kind"] == "position":
            del message["kind"]
            self._answers[src] = Position(**message)

    def _processes(self, *ranks: int) -> dict[int, str]:
        return {rank: self._names[rank] for rank in ranks}

    def _lost(self, who: int, message: dict[str, Any], peer: int | None) -> FailureReport:
        """`who` has left, with `message` as its goodbye. `peer`: a message was waited for, not a collective."""
        if "report" in message:
            return FailureReport.from_json(message["report"])
        position, reason = Position(**message["position"]), message["exit_reason"]
        remarks: tuple[str, ...] = ()
        if peer is None and position.seq < self.seq and ended_well(reason):
            remarks = (describe_left_alone(self._position.operation, [self.rank], [who], {}),)
        return FailureReport("lost", (who,), self._processes(who), {who: position}, reason=reason, remarks=remarks)

    def _late(self, timeout_s: float, peer: int | None) -> FailureReport:
        others = [r for r in range(self.world_size) if r != self.rank]
        with contextlib.suppress(RuntimeError):
            self._engine.send_control({"kind": "positions"})
            wait_until(lambda: len(self._answers) == len(others), lambda: None, _COLLECT_S)
        for r, message in list(self._engine.departed.items()):  # somebody was faster
            if "report" in message:
                return self._lost(r, message, peer)
        if peer is None:
            missing = [r for r in others if r not in self._answers or self._answers[r].seq < self.seq]
        else:
            missing = [peer] if peer >= 0 else others
        return FailureReport(
            "late",
            tuple(missing),
            self._processes(*missing),
            {r: self._answers[r] for r in missing if r in self._answers},
            timeout_s=timeout_s,
            waiter=self.rank,
            is_collective=peer is None,
        )

    def _place(self, ctx: CallContext) -> str:
        return self._sites[ctx.call_site]
