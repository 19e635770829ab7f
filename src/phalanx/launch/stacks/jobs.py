"""Which jobs of this user run on this host: their agents' sockets tell. `command` is who asks, for the messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.errors import LaunchError
from phalanx.launch.agent.agent_socket import PREFIX


@dataclass(frozen=True)
class RunningJob:
    """A `phalanx run`: its process, and the name of its socket."""

    pid: int
    name: str


def find_jobs(command: str = "phalanx stacks") -> list[RunningJob]:
    """The jobs that this user could look at: on this host, in this network namespace (container)."""
    if sys.platform != "linux":
        raise LaunchError(f"{command}: works on Linux only", exit_code=2)
    with open("/proc/net/unix", encoding="ascii", errors="replace") as file:
        names = {words[7] for line in file if len(words := line.split()) > 7}
    return [job for job in parse_names(names) if _owner(job.pid) == os.getuid()]


def parse_names(names: Iterable[str]) -> list[RunningJob]:
    """The jobs among the names of sockets, as /proc/net/unix shows them: "@" stands for "no file"."""
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


def choose_job(jobs: list[RunningJob], wanted: int | None, describe: dict[int, str]) -> RunningJob:
    """The job with process number `wanted`; with None the only one that there is.

    Raises:
        LaunchError: there is none, or there are several to choose from, which are listed with `describe`.
    """
    lines = "\n".join(f"  {job.pid}  {describe.get(job.pid, '')}".rstrip() for job in jobs)
    if wanted is not None:
        for job in jobs:
            if job.pid == wanted:
                return job
        known = f"Running are:\n{lines}" if jobs else "No job of yours is running on this host."
        raise LaunchError(
            f"phalanx stacks: {wanted} is not the process number of a `phalanx run` of yours on this host. {known}",
            exit_code=2,
        )
    if not jobs:
        raise LaunchError("phalanx stacks: no job of yours is running on this host (started by `phalanx run`)")
    if len(jobs) > 1:
        raise LaunchError(f"phalanx stacks: several jobs are running; say which:\n{lines}", exit_code=2)
    return jobs[0]


def describe_command(pid: int) -> str:
    """The words that started process `pid`, as `ps` shows them."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
