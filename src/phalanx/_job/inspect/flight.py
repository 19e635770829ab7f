"""Show the flight recorders of a finished job's ranks, to users and to programs.

describe_flight   which rank waited where, and for whom: printed when a job fails
write_flight      flight.json in --log-dir
merge_logs        the records of several hosts' ranks, merged by group
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx._base.core_numbers import DEADLINE, INTERRUPTED, MISMATCH, NO_MEMORY, PEER_LOST
from phalanx._comm.diagnostics.flight_recorder import Record
from phalanx._comm.diagnostics.observer import GroupLog, RankLog
from phalanx._comm.diagnostics.printable import printable
from phalanx._comm.diagnostics.rank_list import name_ranks

# Describe where each rank was when the job ended, if that explains something.

_MAX_GROUPS = 4
_MAX_LINES = 12

# By status: why the wait ended.
_ENDINGS = {
    MISMATCH: "until the ranks were found to call different operations",
    PEER_LOST: "until a rank was lost",
    DEADLINE: "until it timed out",
    INTERRUPTED: "until it was interrupted",
    NO_MEMORY: "until memory ran out",
}


def describe_flight(groups: Sequence[GroupLog], ended_ns: Mapping[int, int], *, waited_s: float = 0.0) -> str:
    """Return a block of text for each group in which a rank waited; empty if no rank waited.

    Arguments:
        groups: the logs of the groups, read after the ranks have exited.
        ended_ns: when processes exited, by pid, on CLOCK_MONOTONIC.
        waited_s: report a group only if a rank waited at least this long. After Ctrl-C every rank was in some
            operation; only a long wait shows where the job hung.
    """
    blocks = [block for group in groups if (block := _describe_group(group, ended_ns, waited_s))]
    shown = blocks[:_MAX_GROUPS]
    if len(blocks) > len(shown):
        shown.append(f"… and {len(blocks) - len(shown)} more groups in which ranks were waiting.")
    return "\n".join(shown)


def _describe_group(group: GroupLog, ended_ns: Mapping[int, int], waited_s: float) -> str:
    waits = [_seconds(last, rank, ended_ns) for rank in group.ranks if (last := _decisive(rank)) and _is_wait(last)]
    if not waits or max(waits) < waited_s:
        return ""
    said: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for rank in group.ranks:
        last = _decisive(rank)
        seconds = _seconds(last, rank, ended_ns) if last is not None and _is_wait(last) else 0.0
        said.setdefault(_clauses(last, rank), []).append((rank.rank, seconds))
    lines = []
    for (where, how), who in said.items():
        numbers = [number for number, _ in who]
        span = f" for {max(seconds for _, seconds in who):.1f} s" if how else ""
        ending = how if how != "." else ""
        if len(numbers) > 1:
            where = where.replace("was ", "were ", 1) if where.startswith("was ") else where
        lines.append(printable(f"  {name_ranks(numbers)} {where}{span}{ending}"))  # a file name may have any characters
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  … and {len(lines) - _MAX_LINES} more lines; --log-dir keeps all"]
    return "\n".join([f"Last in group {group.name!r} (flight recorder):", *lines])


def _decisive(rank: RankLog) -> Record | None:
    """Return a rank's most informative operation: the one in which its group ended, else its latest."""
    for record in rank.records:
        if record.leave_ns and record.status in _ENDINGS:
            return record
    return rank.records[-1] if rank.records else None


def _is_wait(record: Record) -> bool:
    return record.leave_ns == 0 or record.status in _ENDINGS


def _seconds(record: Record, rank: RankLog, ended_ns: Mapping[int, int]) -> float:
    end = record.leave_ns or ended_ns.get(rank.pid, 0)
    return max(0, end - record.enter_ns) / 1e9


def _clauses(last: Record | None, rank: RankLog) -> tuple[str, str]:
    """Return where the rank was, and how its wait ended: "." if it lasted until the rank exited; "" for no wait."""
    if last is None:
        return ("had called nothing yet" if rank.came else "never came"), ""
    if last.leave_ns == 0:
        return f"was in {last.place}", "."
    if last.status in _ENDINGS:
        return f"waited in {last.place}", f", {_ENDINGS[last.status]}"
    return f"last finished {last.place}" + (", and left" if rank.left else ""), ""


# Write the flight recorders of a job to a file.

FORMAT_VERSION = 1


def write_flight(
    folder: str, groups: Sequence[GroupLog], ended_ns: Mapping[int, int], *, attempt: int | None = None
) -> None:
    """Write `flight.json` into `folder`, or `flight_attempt_N.json` for an attempt N that another attempt follows.

    Raises:
        OSError: the folder cannot be written.
    """
    taken_ns = time.monotonic_ns()
    records = plan_records(groups, ended_ns, taken_ns, time.time_ns() - taken_ns)
    path = os.path.join(folder, "flight.json" if attempt is None else f"flight_attempt_{attempt}.json")
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(records, file)
    os.replace(f"{path}.part", path)  # a reader never sees half a file


def plan_records(
    groups: Sequence[GroupLog], ended_ns: Mapping[int, int], taken_ns: int, unix_offset_ns: int
) -> dict[str, Any]:
    """Return all records of all groups as plain data; times are CLOCK_MONOTONIC nanoseconds.

    `unix_offset_ns` added to a time gives nanoseconds since 1970.
    """
    return {
        "format": "phalanx-flight",
        "version": FORMAT_VERSION,
        "taken_ns": taken_ns,
        "unix_offset_ns": unix_offset_ns,
        "groups": [
            {
                "name": group.name,
                "world_size": group.world_size,
                "ranks": [
                    {
                        "rank": rank.rank,
                        "pid": rank.pid,
                        "left": rank.left,
                        "exit_reason": rank.exit_reason,
                        "ended_ns": ended_ns.get(rank.pid),
                        "operations": [
                            {
                                "operation": record.name,
                                "seq": record.seq,
                                "dtype": record.dtype_name,
                                "reduction": record.reduction or None,
                                "shape": list(record.shape),
                                "root": record.root if record.root >= 0 else None,
                                "peer": record.peer if record.peer >= 0 else None,
                                "site": record.call_site,
                                "enter_ns": record.enter_ns,
                                "leave_ns": record.leave_ns or None,
                                "status": record.status_name,
                            }
                            for record in rank.records
                        ],
                    }
                    for rank in group.ranks
                ],
            }
            for group in groups
        ],
    }


def logs_from_json(
    groups: Sequence[Mapping[str, Any]], ended_ns: Mapping[str, int], offset_ns: int
) -> tuple[list[GroupLog], dict[int, int]]:
    """Decode another host's records and its processes' end times, shifted by `offset_ns` to this host's clock."""
    logs = []
    for group in groups:
        ranks = []
        for rank in group["ranks"]:
            records = tuple(_shift(Record(**{**record, "shape": tuple(record["shape"])}), offset_ns)
                            for record in rank["records"])  # fmt: skip
            ranks.append(RankLog(**{**rank, "records": records}))
        logs.append(GroupLog(str(group["name"]), int(group["world_size"]), tuple(ranks)))
    return logs, {int(pid): int(at) + offset_ns for pid, at in ended_ns.items()}


def _shift(record: Record, offset_ns: int) -> Record:
    leave_ns = record.leave_ns + offset_ns if record.leave_ns else 0
    return replace(record, enter_ns=record.enter_ns + offset_ns, leave_ns=leave_ns)


def merge_logs(logs: Sequence[GroupLog]) -> list[GroupLog]:
    """Return one log for each group, with the ranks of all hosts.

    If two groups had the same name, one after the other, the logs of the later one stay separate, one for each host.
    """
    merged: dict[tuple[str, int], GroupLog] = {}
    apart: list[GroupLog] = []
    for log in logs:
        known = merged.get((log.name, log.world_size))
        if known is None:
            merged[log.name, log.world_size] = log
        elif {rank.rank for rank in known.ranks} & {rank.rank for rank in log.ranks}:
            apart.append(log)  # two groups of the same name existed, one after the other
        else:
            ranks = sorted((*known.ranks, *log.ranks), key=lambda rank: rank.rank)
            merged[log.name, log.world_size] = replace(known, ranks=tuple(ranks))
    return [*merged.values(), *apart]
