"""Merge the flight records of several hosts' ranks, by group and on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx._comm.diagnostics.flight_recorder import Record
from phalanx._comm.diagnostics.observer import GroupLog, RankLog


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

    If the name of a group is used again, the logs of the later group stay separate, one for each host.
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
