"""The `Primary` is the elected coordinator: it changes the voters and standbys if the voters accept. It is pure data.

final ── change ──► joint: the old voters and the new ones must both agree ── finish ──► final
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from phalanx._job.hosts.succession.config import Config, Term
from phalanx._job.hosts.succession.voter import ConfigAccepted, Reply, TermRefused


@dataclass(frozen=True)
class Primary:
    """A `Primary` has a config in force, `committed`; `proposed` replaces it once enough accept it (`accepted_by`)."""

    committed: Config
    proposed: Config | None = None
    accepted_by: frozenset[int] = frozenset()
    deposed_by: Term | None = None

    @property
    def newest(self) -> Config:
        """Return the last config that was proposed or committed."""
        return self.proposed or self.committed

    @property
    def required_standbys(self) -> frozenset[int]:
        """Return the members that must have a change before the change is granted."""
        return frozenset(self.committed.standbys) | frozenset(self.newest.standbys)

    @property
    def electors(self) -> frozenset[int]:
        """Return the members that must accept a proposal."""
        return self.newest.voters

    def change(self, voters: Collection[int], standbys: tuple[int, ...]) -> Primary:
        """Propose other voters and standbys; only while nothing is proposed and the last change is complete."""
        assert self.proposed is None
        assert not self.committed.is_joint
        return self._propose(self.committed.with_voters(voters, standbys))

    def finish(self) -> Primary:
        """Propose the end of a change whose joint config is committed."""
        assert self.proposed is None
        assert self.committed.is_joint
        return self._propose(self.committed.final())

    def _propose(self, config: Config) -> Primary:
        return replace(self, proposed=config, accepted_by=frozenset())

    def on_reply(self, reply: Reply) -> Primary:
        if isinstance(reply, TermRefused) and reply.term > self.committed.term:
            return replace(self, deposed_by=max(reply.term, self.deposed_by or reply.term))
        proposed = self.proposed
        if not isinstance(reply, ConfigAccepted) or proposed is None or (reply.term, reply.version) != proposed.stamp:
            return self
        accepted_by = self.accepted_by | {reply.voter}
        if proposed.is_decided_by(accepted_by):
            return replace(self, committed=proposed, proposed=None, accepted_by=frozenset())
        return replace(self, accepted_by=accepted_by)
