"""Describe the ranks that have arrived to form a group (process, host, settings), and find conflicts among them.

The functions depend only on their arguments, and on whether processes of this host have ended.
"""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from phalanx._base.log import get_logger, warn_once
from phalanx._comm.symmetric_memory.watch import ProcessId

_logger = get_logger(__name__)
PROTOCOL = 4  # version of the records in the store; ranks with different versions refuse to form a group
_MOST_NAMED = 8

Kind = Literal["mismatch", "missing", "lost"]


@dataclass(frozen=True)
class RankInfo:
    """A `RankInfo` describes one rank to the others."""

    host: str
    hostname: str
    token: str
    process: ProcessId
    cpus: frozenset[int]
    core: int  # the version of the C core's layout; 0 without the core
    # the address of this host that other hosts connect to; empty if the job's store has no address either
    address: str = ""
    agreed: str = ""  # settings that must be the same on every rank
    obstacle: str = ""  # why this process cannot share memory
    keeps_store: bool = False  # this process serves the job's store
    interface_problem: str = ""  # why the configured network interface cannot be used
    secret: str = field(default="", repr=False)  # only the ranks of the group receive rank 0's secret

    def to_json(self) -> dict[str, Any]:
        """Return the information as JSON-serialisable data."""
        p = self.process
        own = {name: getattr(self, name) for name in _COLUMNS}
        return {**own, "process": [p.pid, p.start_ticks, p.namespace, p.has_pidfds], "cpus": sorted(self.cpus)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankInfo:
        """Return the information in `data`; a rank with another version of Phalanx may omit fields, and add others."""
        given = {name: data[name] for name in _COLUMNS if name in data}
        return cls(**{**given, "process": ProcessId(*data["process"]), "cpus": frozenset(data["cpus"])})

    def has_ended(self, mine: RankInfo) -> bool:
        """Return whether the rank's process has ended, as far as the process of `mine` can see."""
        return self.host == mine.host and self.process != mine.process and self.process.has_ended()

    def __str__(self) -> str:
        return f"pid {self.process.pid} on {self.hostname}"


_COLUMNS = tuple(each.name for each in fields(RankInfo))


def pack_infos(infos: Sequence[RankInfo]) -> str:
    """Return the information of all ranks as text for the store: about 25 bytes per rank with thousands of ranks.

    Common values are written once. Only the token of each host's first rank is kept, since the host's other ranks
    connect to the first, and no rank connects to the others. Of the secrets only rank 0's is kept.
    """
    hosts: set[str] = set()
    rows = []
    for info in infos:
        row = info.to_json()
        if info.host in hosts:
            row["token"] = ""
        if hosts:
            row["secret"] = ""
        hosts.add(info.host)
        rows.append(row)
    text = json.dumps({name: _number_values([row[name] for row in rows]) for name in rows[0]})
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _number_values(column: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct values of a column, and for each row the index of its value."""
    places: dict[Any, int] = {}
    numbers = [places.setdefault(tuple(value) if isinstance(value, list) else value, len(places)) for value in column]
    return list(places), numbers


def unpack_infos(text: str) -> list[RankInfo]:
    """Return the information that `pack_infos` has packed; ranks with the same `cpus` share one set."""
    columns = {}
    for name, (values, numbers) in json.loads(zlib.decompress(base64.b64decode(text))).items():
        if name == "process":
            values = [ProcessId(*value) for value in values]
        elif name == "cpus":
            values = list(map(frozenset, values))
        columns[name] = [values[number] for number in numbers]
    return list(map(RankInfo, *(columns[each] for each in _COLUMNS)))


@dataclass(frozen=True)
class RankArrival:
    """A `RankArrival` is an arrived rank, its configuration, and when it arrived (Unix seconds, by its own clock)."""

    rank: int
    world_size: int
    info: RankInfo
    at: float = field(default_factory=time.time)
    protocol: int = PROTOCOL
    # rejected, because another process serves the store that this process, as rank 0, should serve
    is_contested: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the arrival as JSON-serialisable data."""
        own = {name: getattr(self, name) for name in ("rank", "world_size", "at", "protocol", "is_contested")}
        return {**own, "rank_info": self.info.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankArrival:
        own = {name: data[name] for name in ("rank", "world_size", "at", "protocol", "is_contested")}
        return cls(info=RankInfo.from_json(data["rank_info"]), **own)

    def __str__(self) -> str:
        return f"{self.info}, which joined at {time.strftime('%H:%M:%S', time.localtime(self.at))}"


@dataclass(frozen=True)
class FormationFailure:
    """A `FormationFailure` is the reason why a group was not formed, with the same `text` on every rank."""

    kind: Kind
    text: str
    ranks: Mapping[int, str]


def find_problem(arrivals: Sequence[RankArrival]) -> FormationFailure | None:
    """Return the first conflict among the ranks that have arrived so far; None if there is none."""
    if len({one.protocol for one in arrivals}) > 1:
        return _disagreement(arrivals, "the ranks run different versions of Phalanx", lambda one: f"{one.protocol}")
    if len({one.world_size for one in arrivals}) > 1:
        return _disagreement(
            arrivals,
            "the ranks were given different world sizes",
            lambda one: f"world size {one.world_size}",
            "Start every rank with the same WORLD_SIZE (world_size=...); if these are two jobs, give each an address "
            "(port, file) of its own.",
        )
    for one in arrivals:
        if not 0 <= one.rank < one.world_size:
            return FormationFailure(
                "mismatch",
                f"{one.info} is rank {one.rank} of {one.world_size}, whose ranks are 0 to {one.world_size - 1}.\n"
                "Check RANK (rank=...) and WORLD_SIZE (world_size=...) of that process.",
                {one.rank: f"rank {one.rank} of {one.world_size}"},
            )
    seen: dict[int, RankArrival] = {}
    for one in arrivals:
        first = seen.setdefault(one.rank, one)
        if first is not one:
            return _twice(one, str(first))
    for one in arrivals:
        if one.is_contested:
            return _twice(one, "the process that serves the store at that port")
    return None


def _twice(one: RankArrival, other: str) -> FormationFailure:
    return FormationFailure(
        "mismatch",
        f"two processes are rank {one.rank} of {one.world_size}:\n  {other}\n  {one}\n"
        "Give each process a RANK (rank=...) of its own; if these are two jobs, give each an address "
        "(port, file) of its own.",
        {one.rank: f"{other}; {one}"},
    )


def find_dead(arrivals: Sequence[RankArrival], mine: RankInfo) -> FormationFailure | None:
    """Return a failure if the process of an arrived rank has ended, as far as the process of `mine` can see."""
    for one in arrivals:
        if one.info.has_ended(mine):
            return FormationFailure(
                "lost",
                f"rank {one.rank} ({one.info}) joined, but ended before all ranks had joined.\nRead its log first.",
                {one.rank: str(one.info)},
            )
    return None


def _disagreement(
    arrivals: Sequence[RankArrival], fact: str, describe: Callable[[RankArrival], str], advice: str = ""
) -> FormationFailure:
    """Return the failure `fact`, with each rank's value; name at most `_MOST_NAMED` ranks per value."""
    by_text: dict[str, list[RankArrival]] = {}
    for one in sorted(arrivals, key=lambda one: one.rank):
        by_text.setdefault(describe(one), []).append(one)
    lines = []
    for belief, who in by_text.items():
        for one in who[:_MOST_NAMED]:
            lines.append(f"  rank {one.rank} ({one.info}): {belief}")
        if len(who) > _MOST_NAMED:
            lines.append(f"  and {len(who) - _MOST_NAMED} more: {belief}")
    text = "\n".join(filter(None, [f"{fact}.", *lines, advice]))
    return FormationFailure("mismatch", text, {one.rank: describe(one) for one in arrivals})


def host_identity() -> str:
    """Return an identifier that is equal in processes that can share memory: boot ID, network and user namespace, uid.

    A host name proves nothing: two hosts may have the same name, and containers of one host different names. The ranks
    pass shared memory through a Unix socket, which needs a common network namespace and user namespace. Pid namespaces
    do not matter.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as f:
            boot = f.read().decode().strip()
        network, users = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user"))
        return f"{boot} {network} {users} {os.getuid()}"
    except (FileNotFoundError, PermissionError) as error:
        warn_once(
            _logger,
            f"backend 'phalanx': {error.filename} cannot be read, so ranks cannot find out which ranks are on their "
            "host. This rank shares memory with no other rank. Mount /proc.",
        )
        return f"pid-{os.getpid()}-{os.urandom(8).hex()}"
