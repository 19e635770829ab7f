"""Define the decisions for an elastic job as data, and plan the messages to its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx._job.agent.failure import ExceptionReport, Exit
from phalanx._job.agent.generation import Generation, HostSlots


@dataclass(frozen=True)
class LostRank:
    """A `LostRank` is a lost rank: its rank in that generation, why and when; `step` is its last complete step."""

    slot: int
    rank: int
    pid: int
    why: str
    at: float
    generation: int
    step: int
    host: str = ""
    replaced: bool = False


@dataclass(frozen=True)
class BeginGeneration:
    """`BeginGeneration` begins `generation`: fork the missing processes, and notify the others."""

    generation: Generation
    holders: tuple[int, ...]  # the slots whose process holds the state
    lost: tuple[LostRank, ...]


@dataclass(frozen=True)
class SendToRank:
    """Send a message to the rank with this slot."""

    slot: int
    message: dict[str, Any]


@dataclass(frozen=True)
class SendGeneration:
    """Tell the rank with this slot the current generation, which it has missed."""

    slot: int


@dataclass(frozen=True)
class Evict:
    """Kill the process in this slot."""

    slot: int
    why: str


@dataclass(frozen=True)
class Continue:
    """Continue the process in this slot, if it was stopped."""

    slot: int


@dataclass(frozen=True)
class Abandon:
    """Go on as if the process in this slot had ended: it was killed, but the kernel cannot end it yet."""

    slot: int


@dataclass(frozen=True)
class GiveUp:
    """`GiveUp` fails the job because of these ranks' ends."""

    exits: tuple[Exit, ...]
    reports: tuple[ExceptionReport, ...]


@dataclass(frozen=True)
class Retire:
    """Leave these slots empty."""

    slots: tuple[int, ...]


@dataclass(frozen=True)
class Print:
    """Print a line for the user."""

    text: str


@dataclass(frozen=True)
class PrepareHost:
    """`PrepareHost` starts a host's ranks for a generation that may never begin and that assigns their ranks."""

    slots: HostSlots
    begun: BeginGeneration


@dataclass(frozen=True)
class DropHost:
    """A host is of no use; it is sent away."""

    member: int
    why: str


# The last two are of a job on several hosts (`phalanx._job.hosts.elastic_hosts`).
ElasticAction = (
    BeginGeneration
    | SendToRank
    | SendGeneration
    | Evict
    | Continue
    | Abandon
    | GiveUp
    | Retire
    | Print
    | PrepareHost
    | DropHost
)


def plan_message(
    generation: Generation, slot: int, begin: BeginGeneration, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the message on a generation to the rank in this slot; `environment` is that of a process started now."""
    slots = generation.slots
    holders = [slots.index(holder) for holder in begin.holders if holder in slots]
    return {
        "kind": "generation",
        "generation": generation.number,
        "rank": slots.index(slot),
        "world_size": len(slots),
        "store": environment.get("PHALANX_STORE", ""),
        "survivors": holders,
        "replacements": [rank for rank in range(len(slots)) if rank not in holders],
        "lost": [{"rank": e.rank, "host": e.host, "pid": e.pid, "why": e.why} for e in begin.lost],
        "local_rank": int(environment.get("LOCAL_RANK", "0")),
        "local_world_size": int(environment.get("LOCAL_WORLD_SIZE", "1")),
        "node_rank": int(environment.get("GROUP_RANK", "0")),
        "environment": dict(environment),
    }


LEAVE = {"kind": "leave"}  # sent to a rank that is no longer part of the job; it ends successfully


def refuse(slot: int, why: str) -> SendToRank:
    """Return the message to a rank that waits for a generation: there will be none."""
    return SendToRank(slot, {"kind": "no generation", "why": why})


def read_int(value: object, default: int) -> int:
    """Return a number of a message, or `default` where it has none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default
