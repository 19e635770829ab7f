"""Write the flight recorders of a job to files: `flight.json` for programs, `flight.trace.json` for ui.perfetto.dev."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx._comm.diagnostics.flight_recorder import Record
from phalanx._comm.diagnostics.observer import GroupLog, RankLog

FORMAT_VERSION = 1


def write_flight(
    folder: str, groups: Sequence[GroupLog], ended_ns: Mapping[int, int], *, attempt: int | None = None
) -> None:
    """Write both files into `folder`; for an attempt that is started again their names have its number.

    Raises:
        OSError: the folder cannot be written.
    """
    stem = "flight" if attempt is None else f"flight_attempt_{attempt}"
    taken_ns = time.monotonic_ns()
    records = plan_records(groups, ended_ns, taken_ns, time.time_ns() - taken_ns)
    for name, data in ((f"{stem}.json", records), (f"{stem}.trace.json", plan_trace(groups, ended_ns, taken_ns))):
        path = os.path.join(folder, name)
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump(data, file)
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


# Plan the Chrome trace format (ui.perfetto.dev opens it): a process per rank, a thread per group, bars for operations.
#
# Source: "Trace Event Format", Google, 2016: complete events ("X") with times in microseconds, metadata ("M") for
# names.


def plan_trace(groups: Sequence[GroupLog], ended_ns: Mapping[int, int], taken_ns: int) -> dict[str, Any]:
    """Return the trace as plain data. An operation that never returned lasts until its process's end, or `taken_ns`.

    Messages of one group can overlap in time, as bars of one thread must not: they get further threads.
    """
    events: list[dict[str, Any]] = []
    threads: dict[int, int] = {}  # by process: how many it has so far
    for group in groups:
        for rank in group.ranks:
            if rank.pid not in threads:
                threads[rank.pid] = 0
                events += [
                    _name("process_name", rank.pid, 0, {"name": f"rank {rank.rank}"}),
                    _name("process_sort_index", rank.pid, 0, {"sort_index": rank.rank}),
                ]
            for number, row in enumerate(_rows(rank, ended_ns, taken_ns)):
                threads[rank.pid] += 1
                tid = threads[rank.pid]
                title = f"group {group.name}" + (f" ({number + 1})" if number else "")
                events.append(_name("thread_name", rank.pid, tid, {"name": title}))
                events += [_bar(record, rank.pid, tid, end) for record, end in row]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _rows(rank: RankLog, ended_ns: Mapping[int, int], taken_ns: int) -> list[list[tuple[Record, int]]]:
    """Return a rank's operations and their ends, in rows within which none begins before the last has ended."""
    rows: list[list[tuple[Record, int]]] = []
    for record in sorted(rank.records, key=lambda record: record.enter_ns):
        end = max(record.enter_ns, record.leave_ns or ended_ns.get(rank.pid, taken_ns))
        free = next((row for row in rows if row[-1][1] <= record.enter_ns), None)
        if free is None:
            rows.append(free := [])
        free.append((record, end))
    return rows


def _name(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _bar(record: Record, pid: int, tid: int, end_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {"seq": record.seq, "shape": list(record.shape), "dtype": record.dtype_name}
    if record.reduction:
        args["reduction"] = record.reduction
    args |= {"site": record.call_site, "status": record.status_name}
    return {
        "ph": "X",
        "name": record.label,
        "cat": record.name,
        "pid": pid,
        "tid": tid,
        "ts": record.enter_ns / 1e3,
        "dur": (end_ns - record.enter_ns) / 1e3,
        "args": args,
    }
