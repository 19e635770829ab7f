"""Describe the ranks that still run after others have exited: their state, and their last operation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from phalanx._base.processes import read_state
from phalanx._comm.diagnostics.flight_recorder import position_of
from phalanx._comm.diagnostics.observer import GroupLog

_MAX_LINES = 12

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in a system call that cannot be interrupted (a disk or a network file system?)",
    "T": "stopped (SIGSTOP or Ctrl-Z); `kill -CONT {pid}` continues it",
    "t": "stopped by a debugger",
    "Z": "exited, about to be reaped",
}


def describe_stragglers(
    pids: Mapping[int, int],
    ranks: Sequence[int],
    world_size: int,
    waited_s: float,
    groups: Sequence[GroupLog],
    local_ranks: range,
) -> str:
    """Return a line for each of `ranks`. `pids` are their processes by rank, `groups` their logs.

    The line for a rank outside `local_ranks` says only that the rank is on another host.
    """
    gone = world_size - len(ranks)
    lines = [f"phalanx run: {gone} of {world_size} ranks have exited; still running {waited_s:.1f} s later:"]
    for rank in ranks[:_MAX_LINES]:
        pid = pids.get(rank)
        absent = "not started yet" if rank in local_ranks else "on another host"
        said = describe_process(pid, groups) if pid is not None else (absent,)
        lines.append(f"  rank {rank}" + (f" (pid {pid})" if pid else "") + ": " + "; ".join(filter(None, said)))
    if len(ranks) > _MAX_LINES:
        lines.append(f"  … and {len(ranks) - _MAX_LINES} more")
    return "\n".join(lines)


def describe_process(pid: int, groups: Sequence[GroupLog]) -> tuple[str, str]:
    """Return a process's state and its last operation; empty where unknown."""
    return _STATES.get(read_state(pid), "").format(pid=pid), _describe_last(pid, groups)


def _describe_last(pid: int | None, groups: Sequence[GroupLog]) -> str:
    """Return the last operation of the process in any group; empty if there is none."""
    logs = [log.records for group in groups for log in group.ranks if log.pid == pid and log.records]
    if not logs:
        return ""
    return str(position_of(max(logs, key=lambda records: records[-1].enter_ns), time.monotonic_ns()))
