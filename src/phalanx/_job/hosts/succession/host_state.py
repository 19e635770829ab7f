"""`HostState` is a host's report to a new leader about its ranks and their progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from phalanx._job.agent.elastic import ElasticRank
from phalanx._job.agent.failure import Exit

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt


@dataclass(frozen=True)
class HostState:
    """A `HostState` has a host's ranks that run, that are being forked (`forking`), and that succeeded (`exits`)."""

    ranks: tuple[ElasticRank, ...]
    forking: tuple[int, ...]
    exits: tuple[Exit, ...]
    has_finished: bool
    has_trained: bool

    @classmethod
    def of(cls, attempt: Attempt) -> HostState:
        elastic, state = attempt.elastic, attempt.state
        slots = attempt.numbers.part.slots
        ended = tuple(exit for slot, exit in state.exits.items() if slot in slots and exit.status == 0)
        forking = tuple(slot for slot in slots if slot not in state.started and slot not in state.exits)
        ranks = tuple(member for slot, member in elastic.members.items() if slot in slots and slot not in state.exits)
        return cls(ranks, forking, ended, elastic.finished, elastic.has_trained)

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": [asdict(replace(rank, report=None)) for rank in self.ranks],
            "forking": list(self.forking),
            "exits": [[exit.rank, exit.pid, exit.at] for exit in self.exits],
            "has_finished": self.has_finished,
            "has_trained": self.has_trained,
        }

    def on_own_clock(self, convert: Callable[[float], float]) -> HostState:
        """Return the state with its times converted to this host's clock by `convert`."""
        return replace(self, exits=tuple(replace(exit, at=convert(exit.at)) for exit in self.exits))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> HostState:
        """Decode the result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: the data is invalid.
        """
        exits = (Exit(int(rank), int(pid), 0, float(at)) for rank, pid, at in fields["exits"])
        return cls(
            tuple(ElasticRank(**rank) for rank in fields["ranks"]),
            tuple(map(int, fields["forking"])),
            tuple(exits),
            bool(fields["has_finished"]),
            bool(fields["has_trained"]),
        )
