"""Write the flight recorders of a job to a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx._comm.diagnostics.observer import GroupLog

FORMAT_VERSION = 1


def write_flight(
    folder: str, groups: Sequence[GroupLog], ended_ns: Mapping[int, int], *, attempt: int | None = None
) -> None:
    """Write `flight.json` into `folder`; for an attempt that is started again its name has the number.

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
