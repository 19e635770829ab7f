"""A `Config` names the job's coordinator, its possible successors, and the voters. It is pure data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

Term = tuple[int, int]  # a count, and the member that coordinates in the term: no two members have the same term
Stamp = tuple[Term, int]  # the term and the version of a config: the config with the higher stamp is newer


@dataclass(frozen=True)
class Electorate:
    """An `Electorate` decides by a majority of its voters; in a tie, `casting` has the casting vote."""

    voters: frozenset[int]
    casting: int

    def fewest_with(self, member: int) -> int:
        """Return how many voters, including `member`, must agree if a casting voter other than `member` disagrees."""
        return (len(self.voters) + (1 if member == self.casting else 2)) // 2

    def is_decided_by(self, members: Collection[int]) -> bool:
        """Return whether a decision of these members is valid. Any two valid decisions have a member in common."""
        present = self.voters & frozenset(members)
        return 2 * len(present) > len(self.voters) or (
            2 * len(present) == len(self.voters) and self.casting in self.voters & present
        )


@dataclass(frozen=True)
class Config:
    """A `Config` is one state of the succession.

    Every electorate must agree to a decision; there are several only while the voters are being changed. `standbys`
    have all changes that the primary has granted, and take over in this order. `addresses` are their polling places.
    """

    term: Term
    version: int
    primary: int
    standbys: tuple[int, ...]
    electorates: tuple[Electorate, ...]
    addresses: tuple[tuple[int, str], ...] = field(default=(), compare=False)

    @classmethod
    def begin(cls, primary: int) -> Config:
        return cls((1, primary), 0, primary, (), (Electorate(frozenset([primary]), primary),))

    @property
    def stamp(self) -> Stamp:
        """Return the stamp by which two configs are ordered in time."""
        return self.term, self.version

    @property
    def voters(self) -> frozenset[int]:
        return frozenset().union(*(each.voters for each in self.electorates))

    @property
    def is_joint(self) -> bool:
        """Return whether the voters are being changed: the next config has only the last electorate."""
        return len(self.electorates) > 1

    @property
    def newest_voters(self) -> frozenset[int]:
        """Return the voters of the last electorate."""
        return self.electorates[-1].voters

    def is_decided_by(self, members: Collection[int]) -> bool:
        """Return whether a decision of these members is valid."""
        return all(each.is_decided_by(members) for each in self.electorates)

    def with_voters(self, voters: Collection[int], standbys: tuple[int, ...]) -> Config:
        """Return the joint config that begins the change to these voters."""
        electorate = Electorate(frozenset(voters), self.primary)
        electorates = self.electorates if electorate in self.electorates else (*self.electorates, electorate)
        return replace(self, version=self.version + 1, standbys=standbys, electorates=electorates)

    def final(self) -> Config:
        return replace(self, version=self.version + 1, electorates=self.electorates[-1:])

    def begin_term(self, term: Term) -> Config:
        """Return the first config of the member that is elected for `term`, without standbys."""
        electorate = Electorate(self.newest_voters, term[1])
        return replace(
            self, term=term, version=0, primary=term[1], standbys=(), electorates=(*self.electorates, electorate)
        )
