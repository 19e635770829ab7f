"""A `Voter` is a host's vote for one coordinator at a time, and never again for an earlier one; pure data.

A coordinator or candidate asks; a voter never withdraws a promise or an acceptance:

    propose(config) ──► accepted, or refused: I have promised a later term
    solicit(term)   ──► promised, and this is the newest config that I know; or refused
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx._job.hosts.succession.config import Config, Term


@dataclass(frozen=True)
class ConfigAccepted:
    """`voter` has accepted the config of this stamp."""

    voter: int
    term: Term
    version: int


@dataclass(frozen=True)
class TermPromised:
    """`voter` accepts nothing of an earlier term than this any more; `newest` is the last config that it accepted."""

    voter: int
    term: Term
    newest: Config | None


@dataclass(frozen=True)
class TermRefused:
    """`voter` has promised `term`, which is later than the requester's."""

    voter: int
    term: Term


Reply = ConfigAccepted | TermPromised | TermRefused


@dataclass(frozen=True)
class Voter:
    """A `Voter` stores the promises and acceptances of one member."""

    member: int
    promised: Term = (0, -1)
    newest: Config | None = None

    def propose(self, config: Config) -> tuple[Voter, Reply]:
        """Answer a request to accept a config."""
        if config.term < self.promised:
            return self, TermRefused(self.member, self.promised)
        if self.newest is None or config.stamp >= self.newest.stamp:
            return replace(self, promised=config.term, newest=config), self._accept(config)
        return self, self._accept(self.newest)  # an old message, which was overtaken by the next one

    def _accept(self, config: Config) -> ConfigAccepted:
        return ConfigAccepted(self.member, config.term, config.version)

    def solicit(self, term: Term) -> tuple[Voter, Reply]:
        """Answer a request to promise a term."""
        if term < self.promised:
            return self, TermRefused(self.member, self.promised)
        return replace(self, promised=term), TermPromised(self.member, term, self.newest)
