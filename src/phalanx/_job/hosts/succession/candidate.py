"""A `Candidate` solicits votes to become the coordinator of a new term after the primary is lost. It is pure data.

soliciting ── a majority has promised ──► proposing ── a majority has accepted ──► it is the primary
    │                                         │
    └── no standby in the newest config: out  └── refused because of a later term: out, or a new candidate
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx._job.hosts.succession.config import Config, Term
from phalanx._job.hosts.succession.primary import Primary
from phalanx._job.hosts.succession.voter import ConfigAccepted, Reply, TermRefused


@dataclass(frozen=True)
class Candidate:
    """Member `term[1]` is a candidate for `term`; `known` is the newest config that it has received."""

    term: Term
    known: Config
    promised_by: frozenset[int] = frozenset()
    proposed: Config | None = None
    accepted_by: frozenset[int] = frozenset()
    refused_by: Term | None = None

    @property
    def electors(self) -> frozenset[int]:
        """Return the members whose votes the candidate requests."""
        return self.known.voters

    @property
    def is_eligible(self) -> bool:
        """Return whether the candidate has all granted changes: it is the primary or a standby of the newest config."""
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
        """Return the primary that the candidate becomes, once a majority has accepted its first config."""
        if self.proposed is None or not self.proposed.is_decided_by(self.accepted_by):
            return None
        return Primary(self.proposed)
