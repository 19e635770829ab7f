"""Take snapshots of one host's ranks. Hosts exchange snapshots as JSON."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from phalanx._base.processes import read_processor_ns, read_state
from phalanx._comm.diagnostics.observer import GroupLog, Observer
from phalanx._comm.diagnostics.progress_page import RankProgress, Track, read_page
from phalanx._job.inspect.stacks.job_snapshot import SnapshotAnswer, ask
from phalanx._job.inspect.stacks.jobs import RunningJob, find_jobs
from phalanx._job.inspect.top.memory import Memory, MemoryReader
from phalanx.errors import LaunchError

COMMAND = "phalanx top"
TIMEOUT_S = 5.0
MAX_OPERATIONS = 64  # per rank and group: enough to cover the last few seconds, few enough to send quickly


class RankOperation(NamedTuple):
    """A `RankOperation` is one operation of one rank; `leave_ns` is 0 while it runs, `root` is a rank of the job."""

    seq: int
    kind: int
    root: int
    enter_ns: int
    leave_ns: int
    label: str


@dataclass(frozen=True)
class MemberSnapshot:
    """A `MemberSnapshot` has the last operations of one rank in one group; `rank` is its rank in the job."""

    rank: int
    pid: int
    operations: tuple[RankOperation, ...]


@dataclass(frozen=True)
class GroupSnapshot:
    """A `GroupSnapshot` has the members of a group that are on this host."""

    name: str
    world_size: int
    members: tuple[MemberSnapshot, ...]


@dataclass(frozen=True)
class RankSnapshot:
    """A `RankSnapshot` describes a live rank: `state` is the letter in /proc/PID/stat, `processor_ns` its CPU time."""

    rank: int
    pid: int
    state: str
    memory: Memory | None
    progress: RankProgress | None
    processor_ns: int | None = None


@dataclass(frozen=True)
class HostSnapshot:
    """A `HostSnapshot` has the ranks of one host; times are in nanoseconds, on the reader's CLOCK_MONOTONIC."""

    name: str
    node: int
    num_nodes: int
    agent: int
    target: str
    world_size: int
    restart_count: int
    max_restarts: int
    generation: int
    started_ns: int
    at_ns: int
    ended: tuple[tuple[int, int], ...]
    lost: tuple[tuple[int, int, int, str], ...]
    ranks: tuple[RankSnapshot, ...]
    groups: tuple[GroupSnapshot, ...]
    report: str = ""


def read_host(job: RunningJob, memory: MemoryReader) -> HostSnapshot:
    """Return a snapshot of the ranks of `job` that are on this host.

    Cost: a message to the agent, a few microseconds of reading for each rank, and /proc. The ranks do no work for it.

    Raises:
        LaunchError: the job has ended, is another user's, or its agent does not answer.
    """
    with ask(job.name, job.pid, TIMEOUT_S, command=COMMAND, stacks=False) as answer:
        return _read(answer, memory)


def read_own_host(memory: MemoryReader) -> str:
    """Return a snapshot of this agent's ranks as JSON, for the leader; a thread of the agent calls this."""
    try:
        job = next(job for job in find_jobs(COMMAND) if job.pid == os.getpid())
        return to_json(read_host(job, memory))
    except (LaunchError, StopIteration) as error:
        return json.dumps({"why": str(error) or "its agent cannot be queried"})


def _read(answer: SnapshotAnswer, memory: MemoryReader) -> HostSnapshot:
    snapshot = answer.snapshot
    pages = dict(zip(snapshot.pages, answer.pages, strict=True))
    groups = []
    for group_info, control in zip(snapshot.groups, answer.controls, strict=True):
        try:
            groups.append(_summarise(Observer(group_info, control).read()))
        except (ImportError, ValueError, OSError):
            continue  # a rank has overwritten the memory's header
    return HostSnapshot(
        name=socket.gethostname(),
        node=snapshot.node,
        num_nodes=snapshot.num_nodes,
        agent=snapshot.agent,
        target=snapshot.target,
        world_size=snapshot.world_size,
        restart_count=snapshot.restart_count,
        max_restarts=snapshot.max_restarts,
        generation=snapshot.generation,
        started_ns=snapshot.started_ns,
        at_ns=time.monotonic_ns(),
        ended=snapshot.ended,
        lost=snapshot.lost,
        ranks=tuple(
            RankSnapshot(
                rank,
                pid,
                read_state(pid),
                memory.read(pid),
                read_page(pages[pid]) if pid in pages else None,
                read_processor_ns(pid),
            )
            for rank, pid in snapshot.ranks
        ),
        groups=tuple(group for group in groups if any(member.operations for member in group.members)),
        report=snapshot.report,
    )


def _summarise(log: GroupLog) -> GroupSnapshot:
    members = []
    for rank in log.ranks:
        if rank.left:
            continue
        records = rank.records[-MAX_OPERATIONS:]
        operations = tuple(
            RankOperation(r.seq, r.kind, r.root, r.enter_ns, r.leave_ns, r.place if r is records[-1] else "")
            for r in records
        )
        members.append(MemberSnapshot(rank.rank, rank.pid, operations))
    return GroupSnapshot(log.name, log.world_size, tuple(members))


def to_json(host: HostSnapshot) -> str:
    """Return the snapshot as JSON."""
    return json.dumps(asdict(host), separators=(",", ":"))


def from_json(text: str, name: str, offset_ns: int) -> HostSnapshot | str:
    """Return the snapshot that `to_json` wrote on the host `name`, or why that host has none.

    `offset_ns`: how far that host's clock is behind ours; it is added to all times.

    Raises:
        ValueError, KeyError, TypeError: the text is not a snapshot.
    """
    fields: dict[str, Any] = json.loads(text)
    if "why" in fields:
        return str(fields["why"])
    ranks = tuple(
        RankSnapshot(
            **{
                **rank,
                "memory": None if rank["memory"] is None else Memory(**rank["memory"]),
                "progress": _shift_progress(rank["progress"], offset_ns),
            }
        )
        for rank in fields.pop("ranks")
    )
    groups = tuple(
        GroupSnapshot(
            group["name"],
            group["world_size"],
            tuple(
                MemberSnapshot(member["rank"], member["pid"], _shift_operations(member["operations"], offset_ns))
                for member in group["members"]
            ),
        )
        for group in fields.pop("groups")
    )
    ended = tuple((int(rank), int(code)) for rank, code in fields.pop("ended"))
    lost = tuple((int(rank), int(pid), int(at) + offset_ns, str(why)) for rank, pid, at, why in fields.pop("lost"))
    host = HostSnapshot(**{**fields, "name": name}, ranks=ranks, groups=groups, ended=ended, lost=lost)
    return replace(host, started_ns=host.started_ns + offset_ns, at_ns=host.at_ns + offset_ns)


def _shift_operations(operations: Sequence[Sequence[Any]], offset_ns: int) -> tuple[RankOperation, ...]:
    shifted = []
    for fields in operations:
        operation = RankOperation(*fields)
        leave_ns = operation.leave_ns + offset_ns if operation.leave_ns else 0
        shifted.append(operation._replace(enter_ns=operation.enter_ns + offset_ns, leave_ns=leave_ns))
    return tuple(shifted)


def _shift_progress(fields: dict[str, Any] | None, offset_ns: int) -> RankProgress | None:
    if fields is None:
        return None
    tracks: list[Track | None] = []
    for track in (fields["loop"], fields["state"]):
        if track is None:
            tracks.append(None)
        else:
            recent = tuple((at + offset_ns, samples) for at, samples in track["recent"])
            tracks.append(Track(**{**track, "recent": recent}))
    return RankProgress(fields["generation"], *tracks)
