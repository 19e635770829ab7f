"""Write our flight recorder in the form of PyTorch's dumps, which `torch.distributed.flight_recorder` analyses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx._base.core_numbers import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    BROADCAST_BUFFERS,
    GATHER,
    GRADIENTS,
    OK,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
)
from phalanx._comm.backend.process_group.recorded import RecordedGroup
from phalanx._comm.diagnostics.flight_recorder import Record

# The names that the analyser knows. A round of gradients is an all_reduce, in a group of its own: see `dump_groups`.
_NAMES = {
    ALL_GATHER: "all_gather", ALL_REDUCE: "all_reduce", ALL_TO_ALL: "all_to_all", BARRIER: "barrier",
    BROADCAST: "broadcast", BROADCAST_BUFFERS: "broadcast", GATHER: "gather", GRADIENTS: "all_reduce",
    REDUCE: "reduce", REDUCE_SCATTER: "reduce_scatter", SCATTER: "scatter", SEND: "send", RECV: "recv",
}  # fmt: skip

_DTYPES = {
    "bytes": "Byte", "bool": "Bool", "uint8": "Byte", "int8": "Char", "uint16": "UInt16", "int16": "Short",
    "uint32": "UInt32", "int32": "Int", "uint64": "UInt64", "int64": "Long", "float16": "Half",
    "bfloat16": "BFloat16", "float32": "Float", "float64": "Double", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}  # fmt: skip


def dump_groups(
    groups: Sequence[RecordedGroup],
    *,
    version: str,
    library: str,
    library_version: str,
    unix_offset_ns: int,
    since_ns: int = 0,
    collectives: bool = True,
    stacks: bool = True,
    only_active: bool = False,
) -> dict[str, Any]:
    """Return what PyTorch's recorder would dump, had it seen these groups' operations of `library`.

    `version` is that of PyTorch's format.

    `unix_offset_ns`, added to CLOCK_MONOTONIC, gives the time since 1970. What began before `since_ns` is left out.

    The rounds of gradients of our DistributedDataParallel are counted apart from the group's other collectives, so they
    appear as a group of their own, "<name>:gradients": the analyser compares what has the same group and number.
    """
    lines: list[tuple[int, dict[str, Any]]] = []
    config: dict[str, Any] = {}
    status: dict[str, Any] = {}
    forgotten = 0
    for group in groups:
        ranks = "[" + ", ".join(map(str, group.global_ranks)) + "]"
        config[group.name] = {"name": group.name, "desc": group.desc, "ranks": ranks}
        if any(record.kind == GRADIENTS for record in group.records):
            name = gradients_name(group)
            config[name] = {"name": name, "desc": group.desc, "ranks": ranks}
        numbered = [record for record in group.records if record.is_numbered_call]
        forgotten += numbered[0].seq - 1 if numbered else 0
        done = [record.seq for record in numbered if record.leave_ns and record.status == OK]
        status[str(group.number)] = {
            "last_enqueued_collective": numbered[-1].seq if numbered else -1,
            "last_started_collective": numbered[-1].seq if numbered else -1,
            "last_completed_collective": done[-1] if done else -1,
        }
        lines += _lines(group, library, unix_offset_ns, stacks=stacks)
    lines.sort(key=lambda line: line[0])
    for number, (_, entry) in enumerate(lines):
        entry["record_id"] = forgotten + number  # the analyser begins where the last of the ranks' rings begins
    dump: dict[str, Any] = {
        "version": version,
        "comm_lib_version": library_version,
        "pg_config": config,
        "pg_status": status,
    }
    if collectives:
        dump["entries"] = [
            entry
            for entered, entry in lines
            if entered >= since_ns and not (only_active and entry["state"] == "completed")
        ]
    return dump


def gradients_name(group: RecordedGroup) -> str:
    """Return the name under which the group's rounds of gradients appear."""
    return f"{group.name}:gradients"


def _lines(group: RecordedGroup, library: str, offset_ns: int, *, stacks: bool) -> list[tuple[int, dict[str, Any]]]:
    """Return the group's operations, each with the time at which it began."""
    lines, collectives, messages = [], 0, 0
    for number, record in enumerate(group.records):
        if record.is_numbered_call:
            collectives = record.seq
        elif not record.is_collective:
            messages += 1
        entry = _entry(group, record, offset_ns, stacks=stacks)
        entry["profiling_name"] = f"{library}:{_NAMES.get(record.kind, record.name)}{_peers(group, record)}"
        entry["collective_seq_id"] = record.seq if record.kind == GRADIENTS else collectives
        entry["p2p_seq_id"] = messages
        entry["op_id"] = number
        lines.append((record.enter_ns, entry))
    return lines


def _entry(group: RecordedGroup, record: Record, offset_ns: int, *, stacks: bool) -> dict[str, Any]:
    name = _NAMES.get(record.kind, record.name)
    inputs, outputs = _sizes(group, record)
    dtype = _DTYPES.get(record.dtype_name, record.dtype_name)
    began = record.enter_ns + offset_ns
    over = bool(record.leave_ns)
    completed = over and record.status == OK
    entry: dict[str, Any] = {
        "pg_id": group.number,
        "process_group": (gradients_name(group) if record.kind == GRADIENTS else group.name, group.desc),
        "thread_name": "",  # our recorder does not keep it
        "thread_id": "",
        "input_sizes": inputs,
        "input_dtypes": [dtype] * len(inputs),
        "output_sizes": outputs,
        "output_dtypes": [dtype] * len(outputs),
        "time_created_ns": began,
        "time_discovered_started_ns": began,
        "time_discovered_completed_ns": record.leave_ns + offset_ns if completed else None,
        "state": "completed" if completed else "started",
        "retired": over,  # an operation that is over and not completed has failed
        "timeout_ms": round(group.timeout_s * 1000),
        "is_p2p": not record.is_collective,
    }
    if completed:
        entry["duration_ms"] = (record.leave_ns - record.enter_ns) / 1e6
    if stacks:
        file, _, line = record.call_site.rpartition(":")
        at_line = int(line) if line.isdigit() else 0
        entry["frames"] = [{"name": name, "filename": file, "line": at_line}] if record.call_site else []
    return entry


def _peers(group: RecordedGroup, record: Record) -> str:
    if record.kind == SEND:
        return f" {group.rank}->{record.peer}"
    if record.kind == RECV:
        return f" {group.rank}<-{record.peer if record.peer >= 0 else '?'}"
    return ""


def _sizes(group: RecordedGroup, record: Record) -> tuple[list[list[int]], list[list[int]]]:
    """Return the shapes that went in and came out. We record one: the input's, or the output's if it is scattered."""
    one = [list(record.shape)]
    each = [list(record.shape) for _ in group.global_ranks]
    whole = [[len(group.global_ranks), *record.shape]]
    is_root = record.root == group.rank
    if record.kind == BARRIER:
        return [], []
    if record.kind == ALL_GATHER:
        return one, whole
    if record.kind == GATHER:
        return one, each if is_root else []
    if record.kind == SCATTER:
        return each if is_root else [], one
    if record.kind == REDUCE_SCATTER:
        return whole, one
    if record.kind == SEND:
        return one, []
    if record.kind == RECV:
        return [], one
    return one, one
