"""Choose the job that `phalanx stacks` and `phalanx top` are about: by process number, by script, or the only one."""

from __future__ import annotations

from phalanx._base.processes import read_start_ticks
from phalanx._job.inspect.stacks.job_snapshot import ask
from phalanx._job.inspect.stacks.jobs import RunningJob, describe_command, find_jobs
from phalanx.errors import LaunchError

_TIMEOUT_S = 5.0


def choose_job(wanted: str | None, command: str) -> RunningJob:
    """Return the only job of this user, or the newest whose process number or script is `wanted`.

    Arguments:
        wanted: what the user typed; None for nothing.
        command: the calling command, for the messages.

    Raises:
        LaunchError: there is no job, or several, which are listed.
    """
    jobs = sorted(find_jobs(command), key=lambda job: read_start_ticks(job.pid) or 0, reverse=True)
    lines = "\n".join(f"  {job.pid}  {describe_command(job.pid)}".rstrip() for job in jobs)
    if wanted is None:
        if not jobs:
            raise LaunchError(f"{command}: no job of yours is running on this host (started by `phalanx run`)")
        if len(jobs) > 1:
            raise LaunchError(f"{command}: several jobs are running; say which:\n{lines}", exit_code=2)
        return jobs[0]
    for job in jobs:
        if str(job.pid) == wanted or (not wanted.isdecimal() and is_called(_target(job, command), wanted)):
            return job
    known = f"Running are:\n{lines}" if jobs else "No job of yours is running on this host."
    if wanted.isdecimal():
        what = f"{wanted} is not the process number of a `phalanx run` of yours on this host"
    else:
        what = f"no `phalanx run` of yours on this host is called {wanted}"
    raise LaunchError(f"{command}: {what}. {known}", exit_code=2)


def is_called(target: str, wanted: str) -> bool:
    """Return whether people call a job that runs `target` so: `exp/train.py` is also `train.py` and `train`."""
    name = target.rpartition("/")[2]
    return wanted in (target, name, name.removesuffix(".py"))


def _target(job: RunningJob, command: str) -> str:
    try:
        with ask(job.name, job.pid, _TIMEOUT_S, command=command, stacks=False) as answer:
            return answer.snapshot.target
    except LaunchError:
        return ""
