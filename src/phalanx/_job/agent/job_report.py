"""Write the report of a job (`--report`): collect its failures, losses and restarts, and write it at the end."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx._base.processes import name_signal
from phalanx._job.agent.elastic_actions import LostRank
from phalanx._job.agent.failure import RankFailure, summarise
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.settings import USAGE_EXIT_CODE
from phalanx._job.agent.supervision import Supervision
from phalanx._job.report.copy_speed import measure_copy_speed
from phalanx._job.report.job_record import RANKS, JobRecord
from phalanx._job.report.measurements import RunEvent
from phalanx._job.report.records import find_other_run, remove_old_records
from phalanx._job.report.write import PAGE, write_report
from phalanx.errors import LaunchError

_MAX_EVENTS = 500  # an elastic job may lose a thousand ranks


class JobReport:
    """A `JobReport` writes the report of a job.

    Raises:
        LaunchError: its folder cannot be written, or belongs to another running job.
    """

    def __init__(self, plan: JobPlan, folder: str, *, is_new: bool = True) -> None:
        """Begin the report of a job. Unless the job `is_new`, keep the records that its ranks have already written."""
        self._folder = os.path.abspath(folder)
        self._begun = plan.begun
        self._events: list[RunEvent] = []
        self._state: Supervision | None = None  # the state of the newest attempt
        self.record = JobRecord(
            name=os.path.basename(plan.settings.target.name),
            command=shlex.join(["phalanx", "run", *_words(plan), *_target_words(plan)]),
            begun=self._begun,
            begun_unix=time.time() - (time.monotonic() - plan.begun),
            world_size=plan.num_ranks,
            max_restarts=plan.settings.max_restarts or 0,
            pid=os.getpid(),
            host=socket.gethostname(),
            run=plan.run,
            is_run_unique=bool(plan.run),
        )
        other = find_other_run(self._folder)
        if other is not None:
            raise LaunchError(
                f"phalanx run: --report {folder}: another job, {other.name} (pid {other.pid}), is running and "
                "writes its report there. Choose another directory, or wait until that job has ended.",
                exit_code=USAGE_EXIT_CODE,
            )
        try:
            remove_old_records(self._folder, "" if is_new else plan.run)
            os.makedirs(os.path.join(self._folder, RANKS), exist_ok=True)
            self.record.write(self._folder)
        except OSError as error:
            raise LaunchError(
                f"phalanx run: --report {folder}: cannot write {error.filename}: {error.strerror}. "
                "Choose a directory to which you can write.",
                exit_code=USAGE_EXIT_CODE,
            ) from error

    def add_attempt(
        self, state: Supervision, losses: Sequence[LostRank], world_size: int, hosts: Mapping[str, tuple[float, float]]
    ) -> None:
        """Add the failures and losses of an attempt that has ended.

        `hosts` maps each other host's name to its clock offset in seconds and one core's copy speed in bytes/s.
        """
        self._state = state
        self.record = replace(
            self.record,
            world_size=world_size,
            clock_offsets={host: offset_s for host, (offset_s, _) in hosts.items()},
            copy_bytes_per_s={host: speed for host, (_, speed) in hosts.items()},
        )
        for lost in losses:
            how = "; replaced" if lost.replaced else "; not replaced"
            self._add(lost.at, "loss", f"{lost.why}{how}", lost.rank, pid=lost.pid, host=lost.host)
        if state.interrupted is not None:
            self._add(time.monotonic(), "signal", f"stopped by {name_signal(state.interrupted)}")
            return
        # The first failure caused the others, although a silent death is noticed after its victims have reported.
        begin = min(map(_when, state.failures), default=0.0)
        for number, failure in enumerate(state.failures):
            detail = failure.report.traceback if failure.report is not None else ""
            kind = "failure" if failure.loss is None else "host lost"
            at = _when(failure) if number else begin
            self._add(at, "stopped" if failure.stopped else kind, summarise(failure), failure.rank, detail)

    def add_restart(self, why: str) -> None:
        self._add(time.monotonic(), "restart", f"all ranks are restarted ({why})")

    def write(self, code: int) -> str:
        """Write the report of a job that has ended with this exit code; return a line for the user; never raise."""
        state = self._state
        end, text = "well" if code == 0 else "failed", ""
        if state is not None and state.interrupted is not None:
            end, text = "stopped", f"stopped by {name_signal(state.interrupted)}"
        elif state is not None and state.failures:
            first = state.failures[0]
            text = f"rank {first.rank}: {summarise(first)}"
        elif code:
            text = f"exit code {code}"
        try:
            self.record = replace(
                self.record,
                ended=time.monotonic(),
                end=end,
                end_text=text,
                exit_code=code,
                events=tuple(self._events),
                copy_bytes_per_s={**self.record.copy_bytes_per_s, socket.gethostname(): measure_copy_speed()},
            )
            self.record.write(self._folder)
            write_report(self._folder)
        except Exception as error:
            why = str(error) or type(error).__name__
            return f"phalanx run: --report: the report could not be written to {self._folder}: {why}"
        return f"phalanx run: the report is in {os.path.join(self._folder, PAGE)}"

    def _add(
        self,
        at: float,
        kind: str,
        text: str,
        rank: int | None = None,
        detail: str = "",
        pid: int | None = None,
        host: str = "",
    ) -> None:
        if len(self._events) < _MAX_EVENTS:
            self._events.append(RunEvent(at - self._begun, kind, text, rank, detail, pid, host))


def _when(failure: RankFailure) -> float:
    if failure.loss is not None:
        return failure.loss.at
    known = failure.report or failure.exit
    return known.at if known is not None else time.monotonic()


def _target_words(plan: JobPlan) -> list[str]:
    target = plan.settings.target
    flags = {"module": ["-m"], "program": ["--no-python"]}.get(target.kind, [])
    return [*flags, target.name, *target.arguments]


def _words(plan: JobPlan) -> list[str]:
    """Return the most important options, as arguments of a command line."""
    settings = plan.settings
    words = ["--nproc-per-node", str(plan.num_ranks)]
    if settings.rendezvous is not None:
        words += ["--nnodes", str(settings.rendezvous.max_nodes)]
    if settings.max_restarts is not None:
        words += ["--max-restarts", str(settings.max_restarts)]
    return words
