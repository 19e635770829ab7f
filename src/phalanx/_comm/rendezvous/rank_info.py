"""Describe the ranks that have arrived at a group's start: process, host and settings, and whether all fit.

It is purely data, but for a look at the processes of this host that may have ended.
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
PROTOCOL = 4  # the version of the words in the store; ranks whose installations speak differently must not guess
_MOST_NAMED = 8

Kind = Literal["mismatch", "missing", "lost"]


@dataclass(frozen=True)
class RankInfo:
    """`RankInfo` describes one rank to the others."""

    host: str
    hostname: str
    token: str
    process: ProcessId
    cpus: frozenset[int]
    core: int  # the version of the C core's layout; 0 without the core
    # the address of this host at which the others reach it; empty if the job's store has no address either
    address: str = ""
    agreed: str = ""  # settings that must be the same on every rank
    obstacle: str = ""  # why this process can share no memory
    keeps_store: bool = False  # the job's store ends with this process
    interface_problem: str = ""  # why the network interface that was named cannot be used
    secret: str = field(default="", repr=False)  # rank 0's is told only to the ranks of the group

    def to_json(self) -> dict[str, Any]:
        """Return the information as plain data, which the store can hold as JSON."""
        p = self.process
        return {
            "host": self.host,
            "hostname": self.hostname,
            "token": self.token,
            "process": [p.pid, p.start_ticks, p.namespace, p.has_pidfds],
            "cpus": sorted(self.cpus),
            "core": self.core,
            "address": self.address,
            "agreed": self.agreed,
            "obstacle": self.obstacle,
            "keeps_store": self.keeps_store,
            "interface_problem": self.interface_problem,
            "secret": self.secret,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankInfo:
        return cls(
            data["host"],
            data["hostname"],
            data["token"],
            ProcessId(*data["process"]),
            frozenset(data["cpus"]),
            data["core"],
            data["address"],
            data["agreed"],
            data["obstacle"],
            data["keeps_store"],
            data["interface_problem"],
            data["secret"],
        )

    def has_ended(self, mine: RankInfo) -> bool:
        """Return whether the rank's process is gone, as far as the process of `mine` can see that."""
        return self.host == mine.host and self.process != mine.process and self.process.has_ended()

    def __str__(self) -> str:
        return f"pid {self.process.pid} on {self.hostname}"


_COLUMNS = tuple(each.name for each in fields(RankInfo))


def pack_infos(infos: Sequence[RankInfo]) -> str:
    """Return the information of all ranks as text for the store: some 25 bytes per rank where there are thousands.

    What ranks have in common is there once. Of each host the token of its first rank is kept, where the others of that
    host fetch its memory; nobody connects to them, so that theirs are left out. So are all secrets but that of rank 0.
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
    """Return each value of a column once, and for each row the place of its value among them."""
    places: dict[Any, int] = {}
    numbers = [places.setdefault(tuple(value) if isinstance(value, list) else value, len(places)) for value in column]
    return list(places), numbers


def unpack_infos(text: str) -> list[RankInfo]:
    """Read what `pack_infos` wrote; ranks with the same cores share one object."""
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
    """A rank that has come, what it believes, and when it came (seconds since 1970, by its own clock)."""

    rank: int
    world_size: int
    info: RankInfo
    at: float = field(default_factory=time.time)
    protocol: int = PROTOCOL
    # whether it is kept out, because another process keeps the store that it, as rank 0, was to keep
    is_contested: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the arrival as plain data, which the store can hold as JSON."""
        own = {name: getattr(self, name) for name in ("rank", "world_size", "at", "protocol", "is_contested")}
        return {**own, "rank_info": self.info.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankArrival:
        own = {name: data[name] for name in ("rank", "world_size", "at", "protocol", "is_contested")}
        return cls(info=RankInfo.from_json(data["rank_info"]), **own)

    def __str__(self) -> str:
        return f"{self.info}, which came at {time.strftime('%H:%M:%S', time.localtime(self.at))}"


@dataclass(frozen=True)
class FormationFailure:
    """A `FormationFailure` says why a group was not formed, with the same `text` on every rank."""

    kind: Kind
    text: str
    ranks: Mapping[int, str]


def find_problem(arrivals: Sequence[RankArrival]) -> FormationFailure | None:
    """Return what is wrong with those who have come so far, in whatever order; None as long as they fit together."""
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
            return _twice(one, "the one that serves the store at that port")
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
    """Return the first of those who came and whose process has ended since, as far as `mine`'s can see that."""
    for one in arrivals:
        if one.info.has_ended(mine):
            return FormationFailure(
                "lost",
                f"rank {one.rank} ({one.info}) came, and ended before all ranks had come.\nRead its log first.",
                {one.rank: str(one.info)},
            )
    return None


def _disagreement(
    arrivals: Sequence[RankArrival], fact: str, say: Callable[[RankArrival], str], advice: str = ""
) -> FormationFailure:
    """Return a failure of `fact` and what each rank believes; of many that believe the same, a few are named."""
    beliefs: dict[str, list[RankArrival]] = {}
    for one in sorted(arrivals, key=lambda one: one.rank):
        beliefs.setdefault(say(one), []).append(one)
    lines = []
    for belief, who in beliefs.items():
        for one in who[:_MOST_NAMED]:
            lines.append(f"  rank {one.rank} ({one.info}): {belief}")
        if len(who) > _MOST_NAMED:
            lines.append(f"  and {len(who) - _MOST_NAMED} more: {belief}")
    text = "\n".join(filter(None, [f"{fact}.", *lines, advice]))
    return FormationFailure("mismatch", text, {one.rank: say(one) for one in arrivals})


def host_identity() -> str:
    """Return what two processes have in common when they can share memory through us: a kernel, network, and user.

    A host's name proves nothing: two hosts may have one name, and containers of one host may have two. The memory is
    handed over through a socket of the network namespace, to a user of the user namespace. Pid namespaces do not
    matter.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as f:
            boot = f.read().decode().strip()
        network, users = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user"))
        return f"{boot} {network} {users} {os.getuid()}"
    except (FileNotFoundError, PermissionError) as error:
        warn_once(
            _logger,
            f"backend 'phalanx': {error.filename} cannot be read, so nobody knows which ranks are on this host: "
            "this one shares memory with none. Mount /proc.",
        )
        return f"pid-{os.getpid()}-{os.urandom(8).hex()}"
