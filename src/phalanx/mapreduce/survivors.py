"""Form the group again after ranks are lost outside of a launcher that replaces them; the store says who is left.

    each survivor   set  here/RANK    = those that it knows to be lost
    the first       add  leader == 1    waits until everybody is here or lost; set  members = those who are here
    the others      get  members        if the leader is lost meanwhile: once more, under the next number

Under `phalanx run` it is not used: there the agent says who is in, and `phalanx.elastic.run` calls again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.coordination.bootstrap import checked_while_meeting
from phalanx.coordination.torch_store import Store
from phalanx.deadline import Deadline
from phalanx.errors import PeerLostError
from phalanx.log import get_logger
from phalanx.mapreduce.team import Person, Team

_logger = get_logger(__name__)
_GROUP_S = 60.0
_PAUSE_S = 0.005


@dataclass
class Survivors:
    """It is what a rank keeps of the first membership: its group, whose ranks are all ranks' numbers, and its store."""

    group: dist.ProcessGroup
    store: Store
    prefix: str
    persons: list[Person]
    timeout_s: float
    number: int = 0  # the number of memberships since

    def regroup(self, team: Team, lost: Collection[int]) -> Team:
        """Return the team of the ranks that are left of `team`, of which `lost` (its ranks) are known not to be.

        Raises:
            PeerLostError: the others go on without this rank.
        """
        members = [person.number for person in team.persons]
        gone = {members[rank] for rank in lost}
        while True:
            self.number += 1
            try:
                members = self._agree(members, gone)
                return self._meet(members)
            except PeerLostError as error:
                gone |= set(error.ranks)
                if not error.ranks:
                    raise

    def find_lost(self, team: Team) -> tuple[int, ...]:
        """Return the ranks of the first membership that are not in `team`."""
        left = {person.number for person in team.persons}
        return tuple(person.number for person in self.persons if person.number not in left)

    def _agree(self, members: list[int], gone: set[int]) -> list[int]:
        me, store = self.group.rank(), self.store
        gone |= self._ended(members)
        store.set(self._key("here", me), json.dumps(sorted(gone)))
        if store.add(self._key("leader"), 1) == 1:
            store.set(self._key("leads"), str(me))
            here = self._wait_for_all(members, gone)
            store.set(self._key("members"), json.dumps(here))
        Deadline.after(None).wait_until(
            lambda: store.check([self._key("members")]), _PAUSE_S, look_around=self._check_leader
        )
        agreed: list[int] = json.loads(store.get(self._key("members")))
        if me not in agreed:
            raise PeerLostError(
                f"map_reduce: the other ranks go on without rank {me}, which has not answered for {self.timeout_s:g} s"
            )
        return agreed

    def _check_leader(self) -> None:
        if self.store.check([self._key("leads")]):
            leader = int(self.store.get(self._key("leads")))
            if leader in self._ended([leader]):
                raise PeerLostError("map_reduce: a rank ended while the others agreed which are left", ranks=(leader,))

    def _wait_for_all(self, members: list[int], gone: set[int]) -> list[int]:
        deadline = Deadline.after(self.timeout_s)
        here: set[int] = set()
        while True:
            for one in members:
                if one not in here and self.store.check([self._key("here", one)]):
                    here.add(one)
                    gone |= set(json.loads(self.store.get(self._key("here", one))))
                if self.store.check([f"{self.prefix}/finished/{one}"]):
                    gone.add(one)  # it has the whole result, and nobody waits for it
            gone |= self._ended(members)
            if here | gone >= set(members) or deadline.passed:
                return sorted(here - self._ended(members))
            time.sleep(_PAUSE_S)

    def _ended(self, members: Collection[int]) -> set[int]:
        mine = self.persons[self.group.rank()]
        return {
            one
            for one in members
            if self.persons[one].host == mine.host
            and self.persons[one] != mine
            and self.persons[one].process.has_ended()
        }

    def _meet(self, members: list[int]) -> Team:
        me = self.group.rank()
        persons = [self.persons[one] for one in members]
        if len(members) == 1:
            return Team(None, dist.HashStore(), persons)

        def check() -> None:
            if self._ended(members):
                raise PeerLostError("map_reduce: a rank ended while the others met")

        ranks = [dist.get_global_rank(self.group, one) for one in members]
        try:
            with checked_while_meeting(check):
                new: Any = dist.new_group(
                    ranks,
                    timeout=timedelta(seconds=min(self.timeout_s, _GROUP_S)),
                    backend=dist.get_backend(self.group),
                    use_local_synchronization=True,
                    group_desc=f"{self.prefix}/{self.number}",
                )
        except RuntimeError as error:
            # A backend that names ranks does so in the numbering of the group that was to be.
            ended = self._ended(members) | {members[rank] for rank in getattr(error, "ranks", ())}
            raise PeerLostError(
                f"map_reduce: the group of the remaining ranks failed: {error}", ranks=tuple(ended)
            ) from error
        _logger.warning("map_reduce: ranks %s go on, rank %d is now %d of %d", ranks, me, new.rank(), new.size())
        return Team.of(new, persons)

    def _key(self, *words: object) -> str:
        return "/".join([self.prefix, "regroup", str(self.number), *map(str, words)])
