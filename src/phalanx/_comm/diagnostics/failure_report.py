"""A `FailureReport` has the facts of a group's failure; only this module turns them into text.

Each transport detects failures in its own way. All of them make a `FailureReport`, so that the same mistake has the
same text on every transport.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from phalanx._comm.diagnostics.call_sites import IN_THREAD
from phalanx._comm.diagnostics.divergence import DIVERGENCE_ADVICE, JOIN_ADVICE, describe_divergence
from phalanx._comm.diagnostics.flight_recorder import RankPosition
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx.errors import ClosedError, DeadlineError, InternalError, MismatchError, PeerLostError, PhalanxError

OVER = "The group can no longer be used."
MISMATCH_ADVICE = "Make every rank call the same operation with the same dtype, size and options, in the same order."
THREAD_ADVICE = (
    "A thread of a library calls collectives of this group at the same time as the program, so their order may differ "
    "between ranks.\nGive the library its own group, as in dcp.async_save(..., process_group=dist.new_group())."
)
ORDER_ADVICE = "If every rank makes these calls, make them in the same order: a loop over a set has no fixed order."
MESSAGE_ADVICE = "Make the receiver's tensor as large as the sender's, with the same dtype."
LATE_ADVICE = "Read the log of the missing rank first; if it is only slow, raise the timeout of the group."
SILENT = "does not answer: it hangs, is stopped, or is cut off"

LEFT = "it left the group (destroy_process_group)"
LEFT_IN_FLIGHT = "it left the group while its operations were in flight (destroy_process_group)"
QUIET_END = "it ended without destroy_process_group"
"""The reason for a process that exited by itself, with any exit code."""
KILLED = "it ended without notice (killed, or crashed)"

Kind = Literal["mismatch", "lost", "interrupted", "late", "no memory", "broken", "internal"]


@dataclass(frozen=True)
class FailedOperation:
    """A `FailedOperation` is the operation that a message names first: 'all_reduce #42 in group 'dp' on rank 3'."""

    label: str  # 'all_reduce #42', 'send to rank 1'
    group: str
    rank: int
    seq: int = 0
    call_site: str = ""  # 'train.py:88'

    def __str__(self) -> str:
        return f"{self.label} in group {self.group!r} on rank {self.rank}"

    @property
    def place(self) -> str:
        """Return 'all_reduce #42 (train.py:88)'."""
        return f"{self.label} ({self.call_site})" if self.call_site else self.label


@dataclass(frozen=True)
class RankCall:
    """A `RankCall` is a rank's call: 'all_reduce(SUM) of float32 (3, 4) at train.py:88'.

    `operation` is as in `RankPosition`; it is empty if the line of the program is not known.
    """

    text: str
    operation: str = ""


@dataclass(frozen=True)
class FailureReport:
    """A `FailureReport` has the facts of a failure, with the group's rank numbers. Unused fields are empty."""

    kind: Kind
    ranks: tuple[int, ...] = ()  # the ranks at fault
    # descriptions of processes for users: 'pid 17 on node3'
    processes: Mapping[int, str] = field(default_factory=dict)
    positions: Mapping[int, RankPosition] = field(default_factory=dict)  # by rank, without those that did not answer
    calls: Mapping[int, RankCall] = field(default_factory=dict)  # of a mismatch: each rank's call
    reason: str = ""  # how the rank ended, what interrupted it, or the error
    timeout_s: float = 0.0  # the timeout of `waiter`; 0 if unknown
    waiter: int = -1  # the rank that gave up waiting; -1 if unknown
    is_collective: bool = True  # otherwise the operation is a message
    earlier: str = ""  # a sentence about an earlier call that ranks made from different lines of the program
    remarks: tuple[str, ...] = ()  # further sentences

    def message(self, operation: FailedOperation | str) -> str:
        """Return the message to the user of the rank that was in `operation`."""
        sentences: dict[Kind, Callable[[], Sequence[str]]] = {
            "mismatch": self._mismatch if self.is_collective else self._message_mismatch,
            "lost": lambda: self._lost(operation),
            "interrupted": self._interrupted,
            "late": self._late,
            "no memory": lambda: [f"{self._who()} had no memory for a message that arrived before its receive."],
            "broken": lambda: [f"{self.reason}."],
            "internal": lambda: [f"{self.reason}. Please report this with the program that shows it."],
        }
        return f"{operation}: " + "\n".join(filter(None, sentences[self.kind]())) + f" {OVER}"

    def error(self, operation: FailedOperation) -> PhalanxError:
        message = self.message(operation)
        error: PhalanxError
        if self.kind == "mismatch":
            error = MismatchError(message, calls={rank: call.text for rank, call in self.calls.items()})
        elif self.kind in ("lost", "interrupted"):
            error = PeerLostError(message, ranks=self.ranks)
        elif self.kind == "late":
            error = DeadlineError(message, missing=self.ranks)
        else:
            error = InternalError(message) if self.kind == "internal" else PhalanxError(message)
        error.operation, error.seq = operation.label.partition(" ")[0], operation.seq
        error.group, error.rank, error.call_site = operation.group, operation.rank, operation.call_site
        error.positions = {rank: str(position) for rank, position in self.positions.items()}
        return error

    # -- the sentences ---------------------------------------------------------------------------------------------

    def _who(self, rank: int | None = None) -> str:
        rank = self.ranks[0] if rank is None else rank
        return f"rank {rank} ({self.processes[rank]})" if rank in self.processes else f"rank {rank}"

    def _called(self) -> str:
        return "\n".join(f"  rank {rank}: {call.text}" for rank, call in self.calls.items())

    def _mismatch(self) -> list[str]:
        # A gradient round is not checked at its beginning, so buckets that all ranks have passed are already averaged.
        in_round = any(call.text.startswith("gradients") for call in self.calls.values())
        # A rank whose call matches the root's copies the root's data without waiting for the other ranks' calls.
        is_early = any(call.text.startswith("broadcast_buffers") for call in self.calls.values())
        changed = "no tensor was changed"
        if in_round:
            changed = "some gradients may already be averaged"
        elif is_early:
            changed = "some buffers may already hold the root's values"
        known = all(call.operation or call.text == NOTHING_CALLED.text for call in self.calls.values())
        divergence = describe_divergence({rank: call.operation for rank, call in self.calls.items()}) if known else ""
        advice = self._advice(is_divergence=bool(divergence))
        # PyTorch's DDP averages gradients with all_reduce; a loop may average its losses likewise, on another line.
        averages = divergence and all(call.text.startswith("all_reduce") for call in self.calls.values())
        may_have_no_data = (in_round or averages) and not self.remarks and advice != THREAD_ADVICE
        return [
            f"the ranks' calls do not match; {changed}.",
            self._called(),
            *self.remarks,
            divergence,
            self.earlier if divergence else "",
            advice,
            f"If a rank has run out of data instead: {JOIN_ADVICE}" if may_have_no_data else "",
        ]

    def _advice(self, *, is_divergence: bool) -> str:
        if any(IN_THREAD in call.text for call in self.calls.values()):
            return THREAD_ADVICE
        return f"{DIVERGENCE_ADVICE} {ORDER_ADVICE}" if is_divergence else MISMATCH_ADVICE

    def _message_mismatch(self) -> list[str]:
        changed = next(iter(self.remarks), "the tensor was not changed")
        return [f"send and recv do not match; {changed}.", self._called(), MESSAGE_ADVICE]

    def _lost(self, operation: FailedOperation | str) -> list[str]:
        position = self.positions.get(self.ranks[0])
        if (
            position is not None
            and isinstance(operation, FailedOperation)
            and self._was_in_same_line(position, operation)
        ):
            before = position.operation.partition(" (")[0]
            if before.startswith("gradients"):
                return [
                    f"{self._who()} ended its loop at {operation.call_site} after {before}; this rank is in "
                    f"{operation.label}.",
                    f"It has probably run out of data. {JOIN_ADVICE}",
                ]
            return [
                f"{self._who()} is gone: {self.reason}, after {before}, on the line that this rank has reached.",
                f"If it ran out of data: {JOIN_ADVICE}",
                "Otherwise read its log first.",
            ]
        last = f"It {position}. " if position is not None else ""
        alone = (*self.remarks, DIVERGENCE_ADVICE) if self.remarks else ()
        return [f"{self._who()} is gone: {self.reason}.", f"{last}Read its log first.", *alone]

    def _was_in_same_line(self, position: RankPosition, operation: FailedOperation) -> bool:
        """Return whether the rank exited normally, and its last operation came from this rank's line."""
        finished = not (position.inside or position.failed or position.elsewhere)
        same_line = bool(operation.call_site) and position.operation.endswith(f"({operation.call_site})")
        return ended_normally(self.reason) and finished and same_line

    def _interrupted(self) -> list[str]:
        position = self.positions.get(self.ranks[0])
        where = f"; it {position}" if position is not None else ""
        return [f"{self._who()} was interrupted ({self.reason}) while the group waited{where}."]

    def _late(self) -> list[str]:
        if self.timeout_s:
            span = f" within {self.timeout_s:.1f} s"
        else:
            span = f"; rank {self.waiter} gave up waiting" if self.waiter >= 0 else ""
        if not self.ranks:
            advice = "A rank or the network is too slow: raise the timeout of the group."
            return [f"the operation did not complete{span}; every rank has arrived since.", advice]
        lines = [f"R{self._who(r)[1:]} {self.positions.get(r, SILENT)}." for r in self.ranks]
        advice = DIVERGENCE_ADVICE if self.is_collective else ""
        return [f"no answer from {name_ranks(self.ranks)}{span}.", *lines, *self.remarks, LATE_ADVICE, advice]

    # -- between processes -----------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the report as JSON, for other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FailureReport:
        data: dict[str, Any] = json.loads(text)
        data["ranks"], data["remarks"] = tuple(data["ranks"]), tuple(data["remarks"])
        data["processes"] = {int(rank): process for rank, process in data["processes"].items()}
        data["positions"] = {int(rank): RankPosition(**position) for rank, position in data["positions"].items()}
        data["calls"] = {int(rank): RankCall(**call) for rank, call in data["calls"].items()}
        return cls(**data)


NOTHING_CALLED = RankCall("nothing yet")


def ended_normally(reason: str) -> bool:
    """Return whether `reason`, the exit reason that a rank published, means that its program had finished."""
    return reason in (LEFT, QUIET_END)


def describe_wait(operation: str, group: str, rank: int, missing: Sequence[int], waited_s: float, where: str) -> str:
    """Return the warning of a rank that has waited long for the `missing` ranks, whose positions are `where`.

    If `missing` is empty, `where` is what the rank waits for.
    """
    whom = name_ranks(missing) if missing else where
    positions = f" ({where})" if missing and where else ""
    return f"{operation} in group {group!r} on rank {rank}: waiting for {whom} for {waited_s:.0f} s{positions}"


def describe_interruption(
    operation: FailedOperation,
    error: BaseException,
    processes: Mapping[int, str],
    positions: Mapping[int, RankPosition] | None,
) -> str:
    """Return the text of an interruption of `operation`: the ranks that this rank waited for, and their positions.

    `processes` are the missing ranks' processes; `positions` is None if their positions were not requested.
    """
    awaited = f"waiting for {name_ranks(list(processes))}" if processes else "under way"
    lines = [f"{operation}: interrupted ({type(error).__name__}) while {awaited}."]
    if positions is not None:
        lines += [f"Rank {r} ({process}) {positions.get(r, SILENT)}." for r, process in processes.items()]
    return "\n".join([*lines, OVER])


def nested(what: str) -> PhalanxError:
    """Return the error for a call in a signal handler that interrupted an operation of the same group."""
    return PhalanxError(
        f"{what}: called in a signal handler that interrupted an operation of the same group. The operation "
        "cannot finish before the handler returns.\nLet the handler set a flag, and check the flag between two "
        "steps, on every rank."
    )


def occupied(group: str, rank: int, timeout_s: float) -> DeadlineError:
    """Return the error for a collective that could not begin in time because of another thread's collective."""
    return DeadlineError(
        f"group {group!r} on rank {rank}: another thread's collective was still running after {timeout_s:.1f} s, so "
        "this collective could not start.\nCall the collectives of a group from one thread, or give each thread its "
        "own group."
    )


def late(
    missing: Sequence[int],
    names: Sequence[str],
    answers: Mapping[int, RankPosition],
    waiter: int,
    timeout_s: float,
    *,
    is_collective: bool,
    remarks: tuple[str, ...] = (),
) -> FailureReport:
    """Return the report of rank `waiter`, which gave up after `timeout_s` because of the `missing` ranks.

    `names` describes all ranks' processes; `answers` has the positions of the ranks that still answer.
    """
    return FailureReport(
        "late",
        tuple(missing),
        {rank: names[rank] for rank in missing},
        {rank: answers[rank] for rank in missing if rank in answers},
        timeout_s=timeout_s,
        waiter=waiter,
        is_collective=is_collective,
        remarks=remarks,
    )


def closed(group: str) -> ClosedError:
    """Return the error for a group that this process has left."""
    return ClosedError(
        f"group {group!r}: it was destroyed in this process, or this process was forked from a rank.\n"
        "Create the group again, or start processes that communicate with spawn."
    )
