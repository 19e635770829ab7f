"""A `Voter` accepts the configs of one term, and then no config of an earlier term. It is pure data.

The primary proposes configs, and a candidate solicits promises; a voter never withdraws a promise or an acceptance:

    propose(config) ──► accepted, or refused because the voter has promised a later term
    solicit(term)   ──► promised, with the newest config that the voter has accepted; or refused
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
    """`voter` will accept no config of an earlier term; `newest` is the last config that it has accepted."""

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
        return self, self._accept(self.newest)  # this message is late: a newer one has overtaken it

    def _accept(self, config: Config) -> ConfigAccepted:
        return ConfigAccepted(self.member, config.term, config.version)

    def solicit(self, term: Term) -> tuple[Voter, Reply]:
        """Answer a request to promise a term."""
        if term < self.promised:
            return self, TermRefused(self.member, self.promised)
        return replace(self, promised=term), TermPromised(self.member, term, self.newest)
