"""Print, for `phalanx stacks`, the operation of each rank in each group, and its Python stacks."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Mapping, Sequence

from phalanx._base.processes import STACKS_SIGNAL
from phalanx._comm.diagnostics.flight_recorder import position_of
from phalanx._comm.diagnostics.observer import GroupLog, Observer
from phalanx._comm.diagnostics.printable import printable
from phalanx._job.inspect.stacks.job_choice import choose_job
from phalanx._job.inspect.stacks.job_snapshot import JobSnapshot, ask, ask_others
from phalanx._job.inspect.stacks.jobs import RunningJob, find_jobs
from phalanx._job.inspect.stacks.survey import ask_ranks
from phalanx.errors import LaunchError

_AGENT_TIMEOUT_S = 5.0
_OTHERS_TIMEOUT_S = 10.0  # more than the agent of the first host waits for the others


def report_stacks(wanted: str | None) -> str:
    """Return where each rank is of the job called `wanted` (see `choose_job`); with None, of the only job of this user.

    Raises:
        LaunchError: there is no such job, or several to choose from, or it does not answer.
    """
    job = choose_job(wanted, "phalanx stacks")
    text, num_others = _report_here(job)
    if num_others == 0:
        return text
    told = ask_others(job.name, _OTHERS_TIMEOUT_S)
    parts = [text, *(f"On {host.name}:\n\n{host.text}" for host in told)]
    if not told:
        parts.append(
            f"Ranks of {num_others} other host{'s' * (num_others > 1)} are shown on the host that leads the job, the "
            "first one if it is there."
        )
    return "\n\n".join(parts)


def report_own_stacks() -> str:
    """Return where the ranks are whose agent this process is, for the first host; a thread of the agent calls it."""
    try:
        return _report_here(next(job for job in find_jobs() if job.pid == os.getpid()))[0]
    except (LaunchError, StopIteration) as error:
        return str(error) or "its agent cannot be asked"


def _report_here(job: RunningJob) -> tuple[str, int]:
    """Return the text for the ranks of this host, and how many other hosts there are."""
    with ask(job.name, job.pid, _AGENT_TIMEOUT_S) as (snapshot, stacks, controls, _):
        if not snapshot.ranks:
            raise LaunchError(f"phalanx stacks: job {job.pid}: no rank is running: it is still starting, or ending")
        # operations first: a rank may be in another one once it has written its stack
        logs = [
            Observer(group_info, control).read() for group_info, control in zip(snapshot.groups, controls, strict=True)
        ]
        now_ns = time.monotonic_ns()
        text = format_report(
            snapshot, logs, ask_ranks(snapshot.ranks, stacks, (snapshot.zygote, snapshot.agent)), now_ns
        )
        return text, snapshot.num_nodes - 1


def format_report(snapshot: JobSnapshot, groups: Sequence[GroupLog], stacks: Mapping[int, str], now_ns: int) -> str:
    """Return the text; `stacks` by rank are faulthandler's words, or one line that says why there are none.

    A name of the job (a script, a file) that holds a new line or an escape code stays on its line, as text.
    """
    here = f" on this host, {snapshot.node + 1} of {snapshot.num_nodes}" if snapshot.num_nodes > 1 else ""
    count = f"{len(snapshot.ranks)} of {snapshot.world_size} ranks running{here}"
    lines = [f"Job {snapshot.agent}: {snapshot.target}, {count}"]
    for rank, pid in snapshot.ranks:
        lines += ["", f"rank {rank} (pid {pid})"]
        members = [(group, log) for group in groups for log in group.ranks if log.pid == pid and not log.left]
        used = [member for member in members if member[1].records]  # groups are often made in numbers and used by few
        lines += [f"  group {group.name!r}: {position_of(log.records, now_ns)}" for group, log in used or members[:1]]
        stack = stacks[rank]
        lines += textwrap.indent(stack, "  ").splitlines() if "\n" in stack else [f"  {stack}"]
    lines += ["", f"(innermost call first; the ranks go on; they were asked with {STACKS_SIGNAL.name})"]
    return "\n".join(printable(line.expandtabs()) for line in lines)
