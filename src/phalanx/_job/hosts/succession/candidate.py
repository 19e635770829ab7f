"""A `Candidate` wants to coordinate in a new term, since the member that did is lost. It is pure data.

soliciting ── promised by those who decide ──► proposing ── accepted by those ──► it is the primary
    │                                              │
    └── not a standby in the newest config ──► out └── refused: a later term ──► out, or again
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx._job.hosts.succession.config import Config, Term
from phalanx._job.hosts.succession.primary import Primary
from phalanx._job.hosts.succession.voter import ConfigAccepted, Reply, TermRefused


@dataclass(frozen=True)
class Candidate:
    """`Candidate`: member `term[1]` wants to be the primary of `term`; `known` is the newest config it has received."""

    term: Term
    known: Config
    promised_by: frozenset[int] = frozenset()
    proposed: Config | None = None
    accepted_by: frozenset[int] = frozenset()
    refused_by: Term | None = None

    @property
    def electors(self) -> frozenset[int]:
        """Return the members whose votes it asks for."""
        return self.known.voters

    @property
    def is_eligible(self) -> bool:
        """Return whether the candidate has all granted changes, as far as it knows."""
        return self.term[1] == self.known.primary or self.term[1] in self.known.standbys

    def on_reply(self, reply: Reply) -> Candidate:
        if isinstance(reply, TermRefused):
            return replace(self, refused_by=reply.term) if reply.term > self.term else self
        if reply.term != self.term:
            return self
        if isinstance(reply, ConfigAccepted):
            return replace(self, accepted_by=self.accepted_by | {reply.voter}) if self.proposed is not None else self
        if self.proposed is not None:
            return self
        known = self.known
        if reply.newest is not None and reply.newest.stamp > known.stamp:
            known = reply.newest
        promised = replace(self, known=known, promised_by=self.promised_by | {reply.voter})
        if promised.is_eligible and known.is_decided_by(promised.promised_by):
            return replace(promised, proposed=known.begin_term(self.term))
        return promised

    @property
    def elected(self) -> Primary | None:
        """Return the primary that it becomes once the electors have accepted its first config; None until then."""
        if self.proposed is None or not self.proposed.is_decided_by(self.accepted_by):
            return None
        return Primary(self.proposed)
