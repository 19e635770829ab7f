"""`References` knows a worker's references: those to objects of its own, and who holds them.

    owner                                        user                          third worker
    Owned: the object, and its forks   <------   a fork: one RRef object
                                                 hands it on: holds its own  -->  a fork of its own
                                       <------------------------------------      "add my fork"
                                       ------------------------------------->     "it is added"
                                                 may drop its own       <------   "I have mine"
    the last fork is dropped: so is the object

A fork is the RRef object of one worker. An object lives as long as it has forks, or its owner itself has an RRef to it.
No lock is held while code of the user may run. A worker that is lost drops all forks that it held.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Any

from torch.futures import Future

RRefId = tuple[int, int]  # the uid of the worker that made it, and its number there


class Owned:
    """`Owned` is an object of this worker to which there are references. `future` has it, or why there is none."""

    __slots__ = ("forks", "future", "id", "is_made")

    def __init__(self, rref_id: RRefId) -> None:
        self.id = rref_id
        self.future: Future[Any] = Future()
        self.forks: dict[RRefId, int] = {}  # by fork of another worker: the worker that holds it
        self.is_made = False  # otherwise another worker told us of it before we made it


class References:
    """`References` has the tables of one worker."""

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._owned: dict[RRefId, Owned] = {}
        # by child fork: what must live, and the worker that it was sent to
        self._handed_on: dict[RRefId, tuple[Any, int]] = {}
        self.dropped: deque[tuple[int, RRefId, RRefId]] = deque()  # (owner, object, fork), by finalizers
        self._lost: set[int] = set()

    def new_id(self) -> RRefId:
        """Return a number that no other worker uses."""
        return self._uid, next(self._numbers)

    def make(self, rref_id: RRefId, fork: RRefId | None = None, holder: int = 0) -> Owned:
        """Make the object with this number; with `fork`, `holder` has a reference."""
        with self._lock:
            owned = self._owned.get(rref_id) or Owned(rref_id)
            owned.is_made = True
            if fork is not None and holder not in self._lost:
                owned.forks[fork] = holder
                self._owned[rref_id] = owned
            return owned

    def find(self, rref_id: RRefId) -> Owned | None:
        """Return the object with this number, while other workers hold it."""
        with self._lock:
            return self._owned.get(rref_id)

    def find_or_expect(self, rref_id: RRefId) -> Owned | None:
        """Return the object with this number; if the request to make it has not arrived yet, it will be there.

        The worker that made it may have answered a call of ours with the reference, on another connection.
        """
        with self._lock:
            owned = self._owned.get(rref_id)
            if owned is None and rref_id[0] != self._uid and rref_id[0] not in self._lost:
                owned = self._owned[rref_id] = Owned(rref_id)
            return owned

    def add_fork(self, owned: Owned, fork: RRefId, holder: int) -> None:
        """Note that `holder` has one more reference to an object."""
        with self._lock:
            if holder not in self._lost:
                owned.forks[fork] = holder
                self._owned[owned.id] = owned

    def announce_fork(self, rref_id: RRefId, fork: RRefId, holder: int) -> bool:
        """Note that `holder` was handed a reference; return whether there is, or will be, such an object.

        The worker that made it may have handed it on before its request to make it has arrived here.
        """
        with self._lock:
            owned = self._owned.get(rref_id)
            if owned is None:
                if rref_id[0] == self._uid or rref_id[0] in self._lost:
                    return False
                owned = self._owned[rref_id] = Owned(rref_id)
            if holder not in self._lost:
                owned.forks[fork] = holder
            return True

    def drop_fork(self, rref_id: RRefId, fork: RRefId) -> Owned | None:
        """Drop a reference that is gone; return the object if that was the last one: release it outside all locks."""
        with self._lock:
            owned = self._owned.get(rref_id)
            if owned is None:
                return None
            owned.forks.pop(fork, None)
            # The request that makes the object may still be on its way: it must find the future that others wait for.
            return self._owned.pop(rref_id) if not owned.forks and owned.is_made else None

    def hand_on(self, fork: RRefId, what: Any, to: int) -> None:
        """Keep `what` until the worker `to` has its own fork."""
        with self._lock:
            if to not in self._lost:
                self._handed_on[fork] = what, to

    def has_arrived(self, fork: RRefId) -> Any:
        """Note that a reference has arrived; return what was kept for it, to be released outside all locks."""
        with self._lock:
            return self._handed_on.pop(fork, None)

    def lose(self, uid: int) -> tuple[list[Any], list[Owned]]:
        """Forget a lost worker; return what it held, to be released, and the objects that it will never make."""
        freed: list[Any] = []
        orphans: list[Owned] = []
        with self._lock:
            self._lost.add(uid)
            for fork in [fork for fork, (_, to) in self._handed_on.items() if to == uid]:
                freed.append(self._handed_on.pop(fork))
            for owned in list(self._owned.values()):
                for fork in [fork for fork, holder in owned.forks.items() if holder == uid]:
                    del owned.forks[fork]
                is_orphan = not owned.is_made and owned.id[0] == uid
                if is_orphan:
                    orphans.append(owned)
                if not owned.forks and (owned.is_made or is_orphan):
                    freed.append(self._owned.pop(owned.id))
        return freed, orphans

    def count(self) -> dict[str, int]:
        """Return how many there are of each kind."""
        with self._lock:
            return {
                "num_owner_rrefs": len(self._owned),
                "num_forks": sum(len(owned.forks) for owned in self._owned.values()),
                "num_pending_children": len(self._handed_on),
            }

    def clear(self) -> list[Owned]:
        """Release everything, because the worker ends."""
        with self._lock:
            owned, self._owned = list(self._owned.values()), {}
            self._handed_on = {}
            return owned
