"""Around every collective over MPI: agree before data moves, and end with one report when something goes wrong.

MPI compares nothing, waits for ever and does not say for whom. So the ranks first gather each other's fingerprints, and
say where they are when one of them runs out of time:

    every rank   gather all fingerprints     they differ: every rank knows every rank's call
    who is late  calls the roll              whoever waits, or computes, answers where it is; then it says goodbye, with
                                             the report, and all who hear it tell the same
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from phalanx.coordination.bootstrap import ranks
from phalanx.deadline import Deadline
from phalanx.diagnostics import failures
from phalanx.diagnostics.call_sites import short
from phalanx.diagnostics.failure_store import FailureReport, Position
from phalanx.engines.mpi import EngineClosed, MpiEngine, PeerLeft, TimedOut, Underway
from phalanx.engines.mpi.polling import wait_until
from phalanx.transport.base import CallContext, Transport
from phalanx.transport.call import BLOCK_BYTES, Call, Disagreement, disagreement, split_blocks

_ROLL_CALL_S = 0.5
_ADVICE = "Read the log of the missing rank first; if it is only slow, raise `timeout`."


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
        self._position = Position(0, False, "has called nothing yet")
        self._answers: dict[int, Position] = {}
        self._report: FailureReport | None = None
        self._note = "it left the group (destroy_process_group)"
        engine.on_word = self._hear

    # -- what the process group asks -----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether this process has left."""
        return (self._engine.is_closed and self._report is None) or self._engine.runtime.is_over

    @property
    def seq(self) -> int:
        """How many collectives this rank has begun."""
        return self._seq

    def site(self, place: tuple[str, int]) -> int:
        """A number for a (file, line)."""
        text = f"{short(place[0])}:{place[1]}" if place[0] else ""
        if text not in self._sites:
            self._sites.append(text)
        return self._sites.index(text)

    def leave_note(self, note: str) -> None:
        """How this process ends, for those who will miss it."""
        self._note = note

    def leave_in_flight(self) -> None:
        """Operations are still running here: wake them."""
        self._note = "it left the group while its operations were in flight (destroy_process_group)"
        self.close()

    def close(self) -> None:
        """Leave. Whoever waits for this rank hears it at once."""
        self._engine.close(seq=self.seq, note=self._note)

    # -- around a collective -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _collective(self, call: Call, ctx: CallContext) -> Iterator[Deadline]:
        """Agree on `call` with all ranks; what fails inside becomes the error that all ranks tell.

        Raises:
            MismatchError: some rank called something else; no tensor was changed.
            PeerLostError, DeadlineError: a rank left or is late.
        """
        with self.lock, torch.no_grad():
            self._check_open(call.name)
            self._seq += 1
            label = f"{call.name} #{self._seq}"
            place = f" ({call.place})" if call.place else ""
            self._position = Position(self.seq, True, f"is in {label}{place}")
            deadline = Deadline.after(ctx.timeout_s)
            with self._told(self._here(label), deadline):
                self._agree(call, deadline)
                yield deadline
            self._position = Position(self.seq, False, f"last finished {label}{place}")

    def _check_open(self, operation: str) -> None:
        if self.closed:
            raise failures.closed(self.group)
        if self._report is not None:
            raise self._report.error(self._here(operation))

    def _here(self, label: str) -> str:
        return f"{label} in group {self.group!r} on rank {self.rank}"

    @contextlib.contextmanager
    def _told(self, here: str, deadline: Deadline, peer: int | None = None) -> Iterator[None]:
        """Turn what fails inside into the group's story. `peer`: only that rank is waited for, below zero any."""
        try:
            yield
        except Disagreement as error:
            self._report = _mismatch(error.calls)
        except TimedOut:
            self._report = self._report or self._late(deadline.timeout_s, peer)
        except PeerLeft as error:
            self._report = self._left(error.peer, error.words)
        except EngineClosed:
            if self._report is None:
                raise failures.closed(self.group) from None
        except self._mpi.Exception as error:
            self._report = FailureReport("broken", f"MPI failed: {error}.")
        except BaseException as error:
            self._interrupted(error)
            raise
        else:
            return
        self._engine.close(seq=self.seq, report=self._report.to_json())
        raise self._report.error(here) from None

    def _interrupted(self, error: BaseException) -> None:
        """Ctrl-C, or a signal handler that raised, ended the wait: the peers should hear why."""
        who = f"rank {self.rank} ({self._names[self.rank]})"
        what = f"{who} was interrupted ({type(error).__name__}) while the group waited; it {self._position.text}."
        self._report = FailureReport("lost", what, ranks=(self.rank,))
        self._engine.close(seq=self.seq, report=self._report.to_json())

    def _agree(self, call: Call, deadline: Deadline) -> None:
        mine = bytearray(call.block(self.seq))
        blocks = bytearray(BLOCK_BYTES * self.world_size)
        byte = self._mpi.BYTE
        self._run(lambda comm: comm.Iallgather([mine, byte], [blocks, byte]), (mine, blocks), deadline)
        if calls := disagreement(split_blocks(bytes(blocks), range(self.world_size))):
            raise Disagreement(calls)

    def _run(self, start: Callable[[Any], Any], memory: Any, deadline: Deadline) -> None:
        """Carry out one of MPI's collectives, which uses `memory`."""
        self._finish(self._engine.begin(lambda: start(self._engine.comm), memory), deadline)

    def _finish(self, operation: Underway, deadline: Deadline) -> None:
        operation.finish(deadline.left_s, self._look)

    def _look(self) -> None:
        """Raise if a rank has left that did not come this far."""
        for peer, words in list(self._engine.departed.items()):
            if words["seq"] < self.seq or "report" in words:
                raise PeerLeft(peer, words)

    # -- stories -------------------------------------------------------------------------------------------------

    def _hear(self, src: int, words: dict[str, Any]) -> None:
        """Called by the thread that listens."""
        if words["kind"] == "roll":
            with contextlib.suppress(RuntimeError):
                self._engine.tell({"kind": "here", **asdict(self._position)}, [src])
        elif words["kind"] == "here":
            self._answers[src] = Position(words["seq"], words["inside"], words["text"])

    def _left(self, peer: int, words: dict[str, Any]) -> FailureReport:
        if "report" in words:
            return FailureReport.from_json(words["report"])
        return FailureReport(
            "lost",
            f"rank {peer} ({self._names[peer]}) is gone: {words.get('note')}.\nRead its log first.",
            ranks=(peer,),
        )

    def _late(self, timeout_s: float, peer: int | None) -> FailureReport:
        others = [r for r in range(self.world_size) if r != self.rank]
        with contextlib.suppress(RuntimeError):
            self._engine.tell({"kind": "roll"})
            wait_until(lambda: len(self._answers) == len(others), lambda: None, _ROLL_CALL_S)
        for r, words in list(self._engine.departed.items()):  # somebody was faster
            if "report" in words:
                return self._left(r, words)
        if peer is None:
            missing = [r for r in others if r not in self._answers or self._answers[r].seq < self.seq]
        else:
            missing = [peer] if peer >= 0 else others
        if not missing:
            return FailureReport(
                "late",
                f"time ran out after {timeout_s:.1f} s; by now every rank has come.\n"
                "A rank or the network is too slow: raise `timeout`.",
            )
        lines = [f"Rank {r} ({self._names[r]}) {self._whereabouts(r)}." for r in missing]
        text = "\n".join((f"no answer from {ranks(missing)} within {timeout_s:.1f} s.", *lines, _ADVICE))
        return FailureReport("late", text, ranks=tuple(missing))

    def _whereabouts(self, rank: int) -> str:
        answer = self._answers.get(rank)
        return answer.text if answer is not None else "does not answer: it hangs, is stopped, or is cut off"

    def _place(self, ctx: CallContext) -> str:
        return self._sites[ctx.site]


def _mismatch(calls: dict[int, str]) -> FailureReport:
    lines = "\n".join(f"  rank {r}: {call}" for r, call in calls.items())
    text = (
        f"the ranks called different things; no tensor was changed.\n{lines}\n"
        "Make every rank call the same operation with the same dtype, size and options, in the same order."
    )
    return FailureReport("mismatch", text, calls=calls)
