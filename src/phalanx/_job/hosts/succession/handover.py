"""An election has two results: an `ElectedLeader`, which all hosts receive, and a `Handover` on the elected host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx._job.coordinator.service import Service
from phalanx._job.hosts.succession.primary import Primary
from phalanx._job.hosts.succession.voter import Voter
from phalanx._job.hosts.succession.witness.witness import Witness


@dataclass(frozen=True)
class ElectedLeader:
    """An `ElectedLeader` is the leader that a majority has elected, with the address of its coordinator."""

    member: int
    address: str
    epoch: bytes
    master_port: int  # MASTER_PORT of the ranks

    def to_json(self) -> dict[str, Any]:
        return {
            "member": self.member,
            "address": self.address,
            "epoch": self.epoch.hex(),
            "master_port": self.master_port,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ElectedLeader:
        epoch = bytes.fromhex(fields["epoch"])
        return cls(int(fields["member"]), str(fields["address"]), epoch, int(fields["master_port"]))


@dataclass(frozen=True)
class Handover:
    """A `Handover` has what an elected host needs to take over; `service` is its copy of the lost coordinator.

    leader_state: the former leader's decisions, as written by `LeaderState`.
    unread: messages to the former leader, with their senders.
    gone: the members that left before the election, and why.
    witness: the job's witness, if it has one.
    """

    leader_state: bytes
    service: Service
    primary: Primary
    voter: Voter
    unread: list[tuple[int, bytes]]
    gone: Mapping[int, str]
    witness: Witness | None
