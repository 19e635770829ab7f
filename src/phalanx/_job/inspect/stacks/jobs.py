"""Find the jobs of this user that run on this host by their agents' sockets. `command` is named in messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx._comm.diagnostics.printable import printable
from phalanx._job.inspect.agent_socket import PREFIX
from phalanx.errors import LaunchError


@dataclass(frozen=True)
class RunningJob:
    """A `RunningJob` is a `phalanx run`: its process, and the name of its socket."""

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
    """Return the jobs among the names of sockets in /proc/net/unix, where "@" means "no file"."""
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
