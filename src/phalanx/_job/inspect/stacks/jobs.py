"""Find the jobs of this user that run on this host by their agents' sockets: all jobs, or the job that the user names.

The parameter `command` is the calling command, for messages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx._base.processes import read_start_ticks
from phalanx._comm.diagnostics.printable import printable
from phalanx._job.inspect.agent_socket import PREFIX
from phalanx._job.inspect.stacks.job_snapshot import ask
from phalanx.errors import LaunchError


@dataclass(frozen=True)
class RunningJob:
    """A `RunningJob` is a running `phalanx run`: its pid and the name of its socket."""

    pid: int
    name: str


def find_jobs(command: str = "phalanx stacks") -> list[RunningJob]:
    """Return the jobs that this user can inspect: on this host, in this network namespace (container)."""
    if sys.platform != "linux":
        raise LaunchError(f"{command}: works on Linux only", exit_code=2)
    with open("/proc/net/unix", encoding="ascii", errors="replace") as file:
        names = {words[7] for line in file if len(words := line.split()) > 7}
    return [job for job in parse_names(names) if _owner(job.pid) == os.getuid()]


def parse_names(names: Iterable[str]) -> list[RunningJob]:
    """Return the jobs among the names of sockets in /proc/net/unix, where a leading "@" marks abstract sockets."""
    jobs = []
    for name in sorted(names):
        pid, dash, _ = name.removeprefix(f"@{PREFIX}").partition("-")
        if name.startswith(f"@{PREFIX}") and dash and pid.isdecimal():
            jobs.append(RunningJob(int(pid), name[1:]))
    return sorted(jobs, key=lambda job: job.pid)


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def describe_command(pid: int) -> str:
    """Return the command line of process `pid`, as `ps` shows it, on one line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return printable(file.read().replace(b"\0", b" ").decode(errors="replace").strip())
    except OSError:
        return ""


_TIMEOUT_S = 5.0


def choose_job(wanted: str | None, command: str) -> RunningJob:
    """Return the only job of this user, or the newest job whose pid or script is `wanted`.

    Arguments:
        wanted: the job as the user has named it, or None.
        command: the calling command, for the messages.

    Raises:
        LaunchError: there is no such job; or `wanted` is None, and there are several, which the message lists.
    """
    jobs = sorted(find_jobs(command), key=lambda job: read_start_ticks(job.pid) or 0, reverse=True)
    lines = "\n".join(f"  {job.pid}  {describe_command(job.pid)}".rstrip() for job in jobs)
    if wanted is None:
        if not jobs:
            raise LaunchError(f"{command}: no job of yours is running on this host (started by `phalanx run`)")
        if len(jobs) > 1:
            raise LaunchError(f"{command}: several jobs are running; choose one:\n{lines}", exit_code=2)
        return jobs[0]
    for job in jobs:
        if str(job.pid) == wanted or (not wanted.isdecimal() and is_called(_target(job, command), wanted)):
            return job
    known = f"Your running jobs:\n{lines}" if jobs else "No job of yours is running on this host."
    if wanted.isdecimal():
        what = f"{wanted} is not the pid of a `phalanx run` of yours on this host"
    else:
        what = f"no `phalanx run` of yours on this host is called {wanted}"
    raise LaunchError(f"{command}: {what}. {known}", exit_code=2)


def is_called(target: str, wanted: str) -> bool:
    """Return whether `wanted` names a job that runs `target`: `exp/train.py` is also called `train.py` and `train`."""
    name = target.rpartition("/")[2]
    return wanted in (target, name, name.removesuffix(".py"))


def _target(job: RunningJob, command: str) -> str:
    try:
        with ask(job.name, job.pid, _TIMEOUT_S, command=command, stacks=False) as answer:
            return answer.snapshot.target
    except LaunchError:
        return ""
