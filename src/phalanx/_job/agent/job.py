"""Run a job from the first attempt to its exit code: restarts, the final summary, the report and the metrics."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx._base.ipc.event_loop import EventLoop
from phalanx._base.processes import ENDING_SIGNALS, kill_descendants, name_signal
from phalanx._comm.diagnostics.observer import GroupLog
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.agent import limits
from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.elastic import BELOW_MINIMUM_EXIT_CODE, ElasticPhase
from phalanx._job.agent.elastic_actions import LostRank
from phalanx._job.agent.error_files import VARIABLE, ErrorFiles, copy_error_file
from phalanx._job.agent.failure import RankFailure, describe_failures
from phalanx._job.agent.folder import JobFolder
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.job_result import JobResult
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.supervision import Supervision
from phalanx._job.agent.zygote_process import ZygoteProcess
from phalanx._job.inspect.agent_socket import AgentSocket
from phalanx._job.inspect.flight import describe_flight, write_flight
from phalanx._job.output.display import Display
from phalanx._job.output.logs import Logs
from phalanx._job.output.pump import Pump, Viewer
from phalanx._job.output.screen import fill_template, find_template, wants_colour
from phalanx.errors import LaunchError

if TYPE_CHECKING:
    from phalanx._job.agent.job_report import JobReport
    from phalanx._job.inspect.top.prometheus import Metrics


LOST_OUTPUT_EXIT_CODE = 120  # as Python's, if stdout cannot be flushed at exit
_OVERDUE_EXIT_CODE = 124  # as from the command `timeout`
# maximum number of restarts of an elastic job before all ranks have begun to train; they lose no progress
_MAX_EARLY_RESTARTS = 3
_HANG_S = 1.0  # when the user stops the job, report ranks that have waited longer than this


@dataclass(frozen=True)
class Flight:
    """A `Flight` has the flight records of an attempt's ranks, and the times of their exits by pid."""

    groups: list[GroupLog]
    ended_ns: dict[int, int]


@dataclass(frozen=True)
class LedAttempt:
    """A `LedAttempt` is a finished attempt that this host has led since the first host was lost.

    `report` is the job's report, which this host began when it took over the lead.
    """

    attempt: Attempt
    report: JobReport | None


def run_to_end(plan: JobPlan, zygote: ZygoteProcess, signals: int) -> int:
    """Run the job on `zygote` to its end, with signals arriving on descriptor `signals`; return the exit code.

    Raises:
        LaunchError: the logs or the report cannot be written, the metrics cannot be served, or a rank cannot start.
    """
    with opened_host(plan, zygote, signals) as host:
        code = run_attempts(plan, host, lambda restart_count: Attempt(plan, host, restart_count))
    return code or (0 if host.display.lost is None else LOST_OUTPUT_EXIT_CODE)


@contextlib.contextmanager
def opened_host(
    plan: JobPlan, zygote: ZygoteProcess, signals: int, viewer: Callable[[Display], Viewer] = lambda display: display
) -> Iterator[HostResources]:
    """Open this host's resources for attempts. On exit, kill all processes of the job, and write all queued output.

    `viewer` returns the object that shows the ranks' lines, given this command's display.

    Raises:
        LaunchError: the log directory cannot be written, or the metrics cannot be served.
    """
    limits.raise_open_files(plan.num_ranks)  # only this process's limit, not the ranks'
    agent_socket = AgentSocket()
    try:
        display = Display(colour=wants_colour(plan.command_environment, plan.columns > 0), terminal=plan.columns > 0)
        template = find_template(plan.settings.log_line_prefix_template, plan.command_environment)
        if template:
            role, name = plan.settings.role, socket.gethostname()
            display.prefix_of = lambda rank: fill_template(template, rank=rank, local_rank=rank, role=role, host=name)
        settings = plan.settings
        logs = Logs(
            settings.log_dir,
            plan.run_id,
            redirects=settings.redirects,
            tee=settings.tee,
            local_ranks_filter=settings.local_ranks_filter,
        )
        host = HostResources(zygote, Pump(viewer(display), logs), display, logs, signals, agent_socket)
    except LaunchError:
        agent_socket.close()
        raise
    metrics: list[Metrics] = []  # at most one
    folder = JobFolder(plan.command_environment)
    host.errors = ErrorFiles(logs.attempts or folder.path)
    try:
        zygote.assign(folder.path)
        if logs.streams:
            display.print(f"phalanx run: --redirects and --tee write to {logs.attempts}")
        folder.remove_others()  # meanwhile the zygote imports
        if plan.settings.metrics is not None:
            metrics += _begin_metrics(plan, display, *plan.settings.metrics)
        yield host
    finally:
        for one in metrics:
            one.close()
        agent_socket.close()
        host.zygote.close(kill_descendants([host.zygote.pid]))  # it may be a replacement
        host.errors.close()
        folder.close()
        display.release()
        host.pump.drain()
        display.flush()
        _flush(host)
        host.pump.close()
        display.close()


def run_attempts(
    plan: JobPlan, host: HostResources, begin: Callable[[int], Attempt], led: LedAttempt | None = None
) -> int:
    """Run attempts until the job has succeeded or may not be restarted, print its result, and return the exit code.

    `begin` creates the attempt with the given number. If this host has taken over the lead during an attempt, that
    attempt is `led`, and comes first. A requested report is written, whatever the result.

    Raises:
        LaunchError: the report's folder cannot be written, or a rank cannot be started.
    """
    reports: list[JobReport] = []  # at most one
    if led is not None and led.report is not None:
        reports.append(led.report)
    code = 1
    try:
        code = _run_attempts(plan, host, begin, reports, led)
    finally:
        for report in reports:
            host.display.print(report.write(code))
    return code


def _begin_metrics(plan: JobPlan, display: Display, host: str, port: int) -> list[Metrics]:
    """Serve the job's metrics; return a list with the server, or an empty one if it is optional and cannot bind."""
    from phalanx._job.inspect.top.prometheus import TOKEN_VARIABLE, Metrics  # here, because most jobs serve none

    try:
        metrics = Metrics(host, port, plan.command_environment.get(TOKEN_VARIABLE, ""))
    except LaunchError as error:
        if plan.settings.needs_metrics:
            raise
        display.print(f"{str(error).removesuffix('.')}. This host serves no metrics.")
        return []
    display.print(f"phalanx run: metrics at {metrics.address}")
    return [metrics]


def begin_report(plan: JobPlan, host: HostResources, folder: str) -> JobReport | None:
    """Begin the report of a running job. On failure, print the reason and return None."""
    try:
        return _make_report(plan, folder, is_new=False)
    except LaunchError as error:
        host.display.print(str(error).replace("--report", "report"))
    return None


def _make_report(plan: JobPlan, folder: str, *, is_new: bool = True) -> JobReport:
    from phalanx._job.agent.job_report import JobReport  # here, because most jobs write none

    return JobReport(plan, folder, is_new=is_new)


def _run_attempts(
    plan: JobPlan,
    host: HostResources,
    begin: Callable[[int], Attempt],
    reports: list[JobReport],
    led: LedAttempt | None,
) -> int:
    # Remaining restarts (in an elastic job, replacements); None: no restarts, but any number of replacements.
    left = plan.settings.max_restarts if led is None else led.attempt.elastic.max_replacements
    left_early, times = _MAX_EARLY_RESTARTS, ""
    losses: list[LostRank] = []
    folder = None if led is not None else plan.settings.report
    is_report_begun = bool(reports) or folder is not None
    for restart_count in itertools.count(0 if led is None else led.attempt.restart_count):
        has_run = led is not None
        attempt = begin(restart_count) if led is None else led.attempt
        led = None
        if folder is not None and not reports:  # not before `begin`: a job that continues elsewhere may record there
            try:
                reports.append(_make_report(plan, folder))
            except LaunchError:
                attempt.close()
                raise
        if left is not None:
            attempt.elastic.max_replacements = left
        if times:  # here, because the number of hosts is known only now
            host.display.print(f"phalanx run: starting all {attempt.state.world_size} ranks again ({times})")
        try:
            if not has_run:
                attempt.run()
            state = attempt.state
            asked_for = plan.settings.log_dir is not None or state.failures or state.interrupted is not None
            flight = Flight(attempt.collect_logs() if asked_for else [], attempt.ended_ns)
        finally:
            attempt.close()
        if attempt.report_folder and not is_report_begun:  # the script has requested it
            report = begin_report(plan, host, attempt.report_folder)
            reports += [] if report is None else [report]
            is_report_begun = True
        for report in reports:
            report.add_attempt(state, attempt.elastic.losses, state.world_size, attempt.report_hosts)
        losses += attempt.elastic.losses
        if attempt.link.has_left:
            return 128 + signal.SIGTERM
        left = None if left is None else max(0, left - attempt.elastic.num_replaced)
        failed = state.interrupted is None and bool(state.failures) and not state.overdue
        early = attempt.elastic.lost_early and left_early > 0 and failed and state.failures[0].report is None
        again = (
            failed
            and bool(left or early)
            and not attempt.ranks.zygote_lost
            and attempt.elastic.phase is not ElasticPhase.ENDING
        )
        _keep_flight(plan, host, flight, restart_count if again else None)
        if attempt.ranks.zygote_lost and not attempt.ranks.zygote_killed and state.interrupted is None:
            return _report_zygote_lost(host, state)
        if not again:
            break
        if early:
            left_early -= 1
            times = "a rank was lost before all ranks had begun to train"
        else:
            left = (left or 0) - 1
            times = "once more" if left == 0 else f"up to {left + 1} more times"
        for report in reports:
            report.add_restart(times)
        _report_failures(host, attempt, flight)
    if losses:
        host.display.print(describe_losses(losses))
    return _conclude(plan, host, attempt, flight)


def _conclude(plan: JobPlan, host: HostResources, attempt: Attempt, flight: Flight) -> int:
    """Print the job's result, and return the exit code."""
    state = attempt.state
    if state.interrupted is not None:
        if state.interrupted == signal.SIGPIPE:
            # the reader has closed our stdout; the reason was already printed
            return 128 + signal.SIGPIPE
        text = describe_flight(flight.groups, flight.ended_ns, waited_s=_HANG_S)
        if text:
            host.display.print(text)
        host.display.print(describe_signal_end(state, traceback=plan.settings.traceback))
        # ranks that handled the signal, saved their work and exited with 0 have succeeded
        ended_well = state.finished and all(end.is_orderly for end in state.exits.values())
        return _find_orderly_code(state) if ended_well else 128 + state.interrupted
    ends = state.exits.values()
    if state.overdue:
        host.display.print(describe_overdue(state))
        return _OVERDUE_EXIT_CODE if state.failures or not state.finished else 0
    if attempt.elastic.phase is ElasticPhase.ENDING and all(end.status in (0, BELOW_MINIMUM_EXIT_CODE) for end in ends):
        return BELOW_MINIMUM_EXIT_CODE  # the reason was already printed
    if not state.failures:
        if plan.result_path:
            JobResult(state.world_size).write(plan.result_path)
        if code := _find_orderly_code(state):
            ranks = name_ranks([rank for rank, end in sorted(state.exits.items()) if end.status])
            host.display.print(f"phalanx run: {ranks} exited with code {code} (EX_TEMPFAIL): start the job again later")
        return code
    _copy_error_file(plan, state.failures[0])
    if plan.result_path:
        text = _describe_failures(attempt, flight)
        JobResult(state.world_size, state.failures[0].rank, text).write(plan.result_path)
        host.display.forget()
    else:
        _report_failures(host, attempt, flight)
    return state.failures[0].code


def _find_orderly_code(state: Supervision) -> int:
    """Return EX_TEMPFAIL if a rank of a job without failures asks to be started again later, otherwise 0."""
    return max((end.status for end in state.exits.values()), default=0)


def _copy_error_file(plan: JobPlan, first: RankFailure) -> None:
    """Copy the first failed rank's error file to the one that TORCHELASTIC_ERROR_FILE names for this command."""
    own = plan.command_environment.get(VARIABLE)
    if own and first.report is not None and first.report.error_file:
        copy_error_file(first.report.error_file, own, first.exit.status if first.exit is not None else 1)


def _report_failures(host: HostResources, attempt: Attempt, flight: Flight) -> None:
    host.display.print("\n" + _describe_failures(attempt, flight))
    host.display.forget()


def _describe_failures(attempt: Attempt, flight: Flight) -> str:
    text = describe_flight(flight.groups, flight.ended_ns)
    state = attempt.state
    name = attempt.link.name_host(state.failures[0].rank)
    whole = attempt.plan.settings.traceback
    failures = describe_failures(state.failures, state.world_size, name, abandoned=state.abandoned, whole=whole)
    return f"{text}\n\n{failures}" if text else failures


def _keep_flight(plan: JobPlan, host: HostResources, flight: Flight, attempt: int | None) -> None:
    folder = plan.settings.log_dir
    if folder is None or not flight.groups:
        return
    try:
        write_flight(folder, flight.groups, flight.ended_ns, attempt=attempt)
    except OSError as error:
        host.display.print(
            f"phalanx run: the flight recorder could not be written to {folder}: {error.strerror or error}"
        )


def _report_zygote_lost(host: HostResources, state: Supervision) -> int:
    host.display.release()
    pid, status = host.zygote.pid, host.zygote.wait_exit()
    how = name_signal(-status) if status < 0 else f"exit code {status}"
    host.display.print(
        f"phalanx run: the zygote (pid {pid}), which forks the ranks, exited: {how}. "
        f"All {len(state.exits) + len(state.running)} ranks were killed. "
        "If nobody killed it, the host may be out of memory; if it exited while importing torch, try --no-preload."
    )
    return 1


def _flush(host: HostResources) -> None:
    """Write the queued output, however slow its reader is, until a signal arrives that would end the job."""
    numbers: list[int] = []
    loop = EventLoop(host.watch_signals(numbers.append), host.watch_display())
    while host.display.writers and not set(numbers) & set(ENDING_SIGNALS):
        loop.turn()


_MAX_LINES = 12
_MAX_PLACES = 3  # in the line about a job that the user has stopped


def describe_losses(losses: Sequence[LostRank]) -> str:
    """Return a list of the ranks that an elastic job has lost, in order; leave out the middle of a long list."""
    lines = [
        f"  rank {lost.rank} (pid {lost.pid}){f' on {lost.host}' if lost.host else ''}"
        f"{f' after step {lost.step}' if lost.step >= 0 else ''}: {lost.why}"
        f"{'; replaced' if lost.replaced else '; not replaced'}"
        for lost in losses
    ]
    if len(lines) > _MAX_LINES:
        half = _MAX_LINES // 2
        lines[half:-half] = [f"  … {len(lines) - 2 * half} more …"]
    count = f"{len(losses)} rank{'s were' if len(losses) > 1 else ' was'} lost during the run:"
    return "\n".join([f"phalanx run: {count}", *lines])


def describe_overdue(state: Supervision) -> str:
    """Return one line about ranks that exceeded the exit timeout, and were stopped."""
    return (
        f"phalanx run: {name_ranks(state.overdue)} did not exit within "
        f"{state.exit_timeout_s:g} s after the first (--exit-timeout), and had to be "
        f"{'killed' if state.killed else 'stopped'}"
    )


def describe_signal_end(state: Supervision, *, traceback: bool = False) -> str:
    """Return one line about a job that a signal has stopped; `traceback`: the tracebacks were already shown."""
    assert state.interrupted is not None
    name = name_signal(state.interrupted)
    if not state.killed:
        return f"phalanx run: stopped by {name}{'' if traceback else _describe_places(state)}"
    ranks = ", ".join(str(rank) for rank in state.killed)
    return (
        f"phalanx run: stopped by {name}; rank{'s' * (len(state.killed) > 1)} {ranks} did not exit within "
        f"{state.shutdown_timeout_s:g} s and had to be killed (--shutdown-timeout sets the time)"
    )


def _describe_places(state: Supervision) -> str:
    """Return where the user's signal interrupted the ranks that have reported it."""
    places: dict[str, list[int]] = {}
    for rank, report in sorted(state.reports.items()):
        if report.place and state.is_stopped_by_user(report):
            places.setdefault(report.place, []).append(rank)
    if not places:
        return ""
    shown = [f"{name_ranks(ranks)} at {place}" for place, ranks in list(places.items())[:_MAX_PLACES]]
    more = f", {len(places) - _MAX_PLACES} more places" if len(places) > _MAX_PLACES else ""
    return f"; {', '.join(shown)}{more} (--traceback shows tracebacks)"
