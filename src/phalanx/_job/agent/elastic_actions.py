"""Define the actions that `Elastic` decides on, as data, and plan the messages to the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx._job.agent.environment import Place
from phalanx._job.agent.failure import ExceptionReport, Exit
from phalanx._job.agent.generation import Generation, HostAssignment, HostSlots


@dataclass(frozen=True)
class LostRank:
    """A `LostRank` is a rank that was lost in `generation`: why, when (`at`), and the latest known step of the job."""

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
    """Begin `generation`: fork the missing processes, and notify the others."""

    generation: Generation
    holders: tuple[int, ...]  # the slots whose process has the training state
    lost: tuple[LostRank, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the action as JSON-serialisable data, which the first host sends to the others."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> BeginGeneration:
        """Return the action that `to_json` has encoded.

        Raises:
            KeyError, TypeError, ValueError: the data is invalid.
        """
        parts = tuple(
            HostAssignment(
                int(part["member"]),
                tuple(int(slot) for slot in part["slots"]),
                tuple(int(slot) for slot in part["forked"]),
                Place(**part["place"]),
            )
            for part in fields["generation"]["parts"]
        )
        generation = Generation(int(fields["generation"]["number"]), parts)
        holders = tuple(int(slot) for slot in fields["holders"])
        return cls(generation, holders, tuple(LostRank(**lost) for lost in fields["lost"]))


@dataclass(frozen=True)
class SendToRank:
    """Send a message to the rank with this slot."""

    slot: int
    message: dict[str, Any]


@dataclass(frozen=True)
class SendGeneration:
    """Send the current generation to the rank with this slot, which has not joined that generation."""

    slot: int


@dataclass(frozen=True)
class Evict:
    """Kill the process in this slot."""

    slot: int
    why: str


@dataclass(frozen=True)
class Continue:
    """Send SIGCONT to the process in this slot."""

    slot: int


@dataclass(frozen=True)
class Abandon:
    """Continue as if the process in this slot had exited: it was killed, but is stuck in the kernel."""

    slot: int


@dataclass(frozen=True)
class GiveUp:
    """Fail the job because of these exits and reports."""

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
    """Start the processes of a joining host. `begun` assigns their ranks, but its generation may never begin."""

    slots: HostSlots
    begun: BeginGeneration


@dataclass(frozen=True)
class DropHost:
    """Reject a host that wants to join."""

    member: int
    why: str


# `PrepareHost` and `DropHost` occur only in a job on several hosts (`phalanx._job.hosts.elastic_hosts`).
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
    """Return the message that announces a generation to the rank in this slot.

    `environment` is the environment that a process started in this slot would get.
    """
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


LEAVE = {"kind": "leave"}  # for a rank that is no longer part of the job; the rank ends successfully


def refuse(slot: int, why: str) -> SendToRank:
    """Return the message that notifies a waiting rank that no further generation will begin."""
    return SendToRank(slot, {"kind": "no generation", "why": why})


def read_int(value: object, default: int) -> int:
    """Return `value` if it is an integer, otherwise `default`."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default
