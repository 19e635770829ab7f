"""Decide which rank's failure came first, and describe it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite

from phalanx._base.loss_detection import SILENT_DEATH_LAG_S
from phalanx._base.processes import describe_address_space, name_signal
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.inspect.stacks.dump import without_launcher
from phalanx._job.output.traceback_buffer import without_numbers

_MAX_TEXT = 8_000  # characters
_MAX_REPORT_BYTES = 150_000  # a report is one datagram; the default socket buffer holds about 200 kB
_OUTSIDE_CAUSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class ExceptionReport:
    """An `ExceptionReport` is a rank's report of an uncaught exception.

    `types` are the class names in the exception's MRO. `own_lines` is the traceback without the lines of libraries.
    `error_file` is the path of the rank's `torch.distributed.elastic` error file, if the rank has written one.
    """

    rank: int
    pid: int
    at: float
    types: tuple[str, ...]
    summary: str
    place: str
    traceback: str
    error_file: str = ""
    own_lines: str = ""
    advice: str = ""

    def to_bytes(self) -> bytes:
        """Return the report as one datagram; leave out the middle of long texts."""
        fields, half = asdict(self), _MAX_TEXT // 2
        while True:
            for key in ("summary", "traceback", "own_lines"):
                text = getattr(self, key)
                if len(text) > 2 * half:
                    left_out = len(text) - 2 * half
                    fields[key] = f"{text[:half]}\n  [… {left_out} characters left out …]\n{text[-half:]}"
            data = json.dumps(fields).encode()
            if len(data) <= _MAX_REPORT_BYTES or half < 100:
                return data
            half //= 2  # JSON takes up to twelve bytes for a character

    @classmethod
    def from_bytes(cls, data: bytes) -> ExceptionReport | None:
        """Return the report that `to_bytes` has encoded; None for other data."""
        try:
            fields = json.loads(data)
            report = cls(**{**fields, "types": tuple(fields["types"])})
            texts = (
                report.summary, report.place, report.traceback, report.error_file, report.own_lines, report.advice,
            )  # fmt: skip
            sound = (
                all(isinstance(number, int) for number in (report.rank, report.pid))
                and isinstance(report.at, float)
                and isfinite(report.at)
                and all(isinstance(text, str) for text in (*report.types, *texts))
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return report if sound else None


@dataclass(frozen=True)
class Exit:
    """The exit of a rank's process: `status` is its exit code, or minus the signal that killed it."""

    rank: int
    pid: int
    status: int
    at: float
    dump: str = ""  # faulthandler's dump of a fatal signal

    @property
    def is_orderly(self) -> bool:
        """Return whether the rank has succeeded, or asks to be started again later (EX_TEMPFAIL)."""
        return self.status in (0, os.EX_TEMPFAIL)


@dataclass(frozen=True)
class HostLoss:
    """A `HostLoss` is a lost host: its name, why it is considered lost, and when its last message arrived."""

    host: str
    why: str
    at: float


@dataclass(frozen=True)
class RankFailure:
    """A `RankFailure` is how a rank failed: its report, its exit, or both; or the loss of its host.

    A rank can report a failure and then hang in its own clean-up.

    `stopped`: the rank had not failed before the agent's signal stopped it.
    """

    rank: int
    report: ExceptionReport | None
    exit: Exit | None
    stopped: bool = False
    loss: HostLoss | None = None

    @property
    def pid(self) -> int:
        known = self.exit or self.report
        assert known is not None
        return known.pid

    @property
    def code(self) -> int:
        """Return the exit code as in a shell: 128 + n for signal n; 1 if a rank was killed after its report."""
        if self.exit is None or (self.report is not None and self.exit.status == -signal.SIGKILL):
            return 1
        # a process can exit with 0 after its exception (os._exit in a hook), and has still failed
        return (self.exit.status or 1) if self.exit.status >= 0 else 128 - self.exit.status


def decide_failures(
    exits: Mapping[int, Exit],
    reports: Mapping[int, ExceptionReport],
    sent: Mapping[int, float],
    lost: Mapping[int, HostLoss] | None = None,
) -> list[RankFailure]:
    """Return the failed ranks, the likely root cause first.

    Arguments:
        exits: the exit of each rank that has exited.
        reports: the report of each rank that has sent one.
        sent: by signal, when it was first sent to stop ranks; a later death by that signal counts as `stopped`.
        lost: the lost host of each rank whose host is lost.

    Failures are sorted by time, with three corrections. A silent death (a signal, os._exit) is dated back by
    `SILENT_DEATH_LAG_S`: the kernel closes the dying rank's sockets first, so peers can raise before its parent is
    notified. SIGABRT is not dated back, because a library that aborts has often waited for its peers. A rank whose
    exception reports a lost peer comes after the ranks that failed on their own. Ranks that failed after the agent
    began to stop ranks come last, unless a signal that the agent did not send killed them, such as SIGSEGV.
    """
    stopping_since = min(sent.values(), default=float("inf"))
    placed: list[tuple[tuple[int, float], RankFailure]] = []
    for rank, loss in (lost or {}).items():
        if rank not in reports:
            placed.append(((0, loss.at), RankFailure(rank, None, None, loss=loss)))
    for rank in sorted(set(exits) | set(reports)):
        end, report = exits.get(rank), reports.get(rank)
        if report is not None:
            group = 2 if report.at > stopping_since else 1 if "PeerLostError" in report.types else 0
            placed.append(((group, report.at), RankFailure(rank, report, end)))
        elif end is not None and not end.is_orderly:
            early = end.at <= stopping_since
            stopped = not early and -end.status in sent
            fault = -end.status in _OUTSIDE_CAUSES and not stopped
            lag = SILENT_DEATH_LAG_S if early and end.status != -signal.SIGABRT else 0.0
            placed.append(((0 if early or fault else 2, end.at - lag), RankFailure(rank, None, end, stopped)))
    return [failure for _, failure in sorted(placed, key=lambda pair: pair[0])]


def describe_failures(
    failures: Sequence[RankFailure], world_size: int, host: str, *, abandoned: Collection[int] = (), whole: bool = False
) -> str:
    """Return the text that the command prints at the end: a line for each consequence, then the first failure.

    Arguments:
        abandoned: the ranks that were not started because of the failure.
        whole: show the whole traceback, including the lines of libraries.
    """
    first = failures[0]
    others = [
        failure
        for failure in failures[1:]
        if not failure.stopped and not (failure.loss is not None and failure.loss == first.loss)
    ]
    stopped = [failure.rank for failure in failures[1:] if failure.stopped]
    lines = []
    if others or stopped or abandoned:
        lines.append("After it, and probably because of it:")
        lines += [f"  {name_ranks(ranks)}: {how}" for ranks, how in _fold(others)]
        if stopped:
            lines.append(f"  {name_ranks(stopped)}: stopped by phalanx run")
        if abandoned:
            lines.append(f"  {name_ranks(list(abandoned))}: not started")
        lines.append("")
    if first.loss is not None:
        ranks = [failure.rank for failure in failures if failure.loss == first.loss]
        which = f"{name_ranks(ranks)} of {world_size}"
        lines.append(f"First failure: {first.loss.host}, with {which}, is lost: {first.loss.why}")
        return "\n".join(lines)
    lines.append(f"First failure: rank {first.rank} of {world_size} on {host} (pid {first.pid}): {summarise(first)}")
    if first.report and first.report.traceback:
        lines += ["", (first.report.traceback if whole else first.report.own_lines or first.report.traceback).rstrip()]
    elif first.exit and first.exit.dump:
        lines += ["", without_launcher(first.exit.dump)]
    if first.report and first.report.error_file:
        lines += ["", f"Its error file: {first.report.error_file}"]
    if advice := first.report.advice if first.report and first.report.advice else _advise_on_memory(first):
        lines += ["", advice]
    return "\n".join(lines)


def _advise_on_memory(failure: RankFailure) -> str:
    """Return advice if the limit on address space, which the ranks inherit from this command, may be the cause.

    Signs are a library that could not be loaded, a failed allocation, or an exit without a report: with code 1, by
    SIGABRT or by SIGSEGV.
    """
    if failure.report is not None:
        is_likely = failure.report.types[:1] in (("ImportError",), ("MemoryError",))
    else:
        is_likely = failure.exit is not None and failure.exit.status in (1, -signal.SIGABRT, -signal.SIGSEGV)
    return describe_address_space() if is_likely else ""


def _fold(failures: Sequence[RankFailure]) -> list[tuple[list[int], str]]:
    """Group the ranks whose summaries differ only in numbers, and that have the same place and exit code."""
    folded: dict[tuple[bytes, str], tuple[list[int], list[str]]] = {}
    for failure in failures:
        text, summary = summarise(failure), failure.report.summary if failure.report is not None else ""
        key = without_numbers(summary.encode(errors="replace")), text.removeprefix(summary)
        ranks, texts = folded.setdefault(key, ([], []))
        ranks.append(failure.rank)
        texts.append(text)
    return [
        (ranks, texts[0] if len(set(texts)) == 1 else f"{texts[0]}; the numbers are rank {ranks[0]}'s")
        for ranks, texts in folded.values()
    ]


def summarise(failure: RankFailure) -> str:
    """Return a failure in one line, such as `ValueError: the data is wrong at train.py:88 (exit code 1)`."""
    report, end = failure.report, failure.exit
    if failure.loss is not None:
        return f"lost with {failure.loss.host}"
    if end is None:
        how = "had not exited yet"
    elif report is not None and end.status == -signal.SIGKILL:
        how = "did not exit by itself and was killed"
    else:
        how = f"exit code {end.status}" if end.status >= 0 else name_signal(-end.status)
    if report is None:
        return how
    place = f" at {report.place}" if report.place else ""
    return f"{report.summary}{place} ({how})"
