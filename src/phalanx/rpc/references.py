"""`References` count the references to a worker's objects, and keep the references that are being sent.

    owner                                        user                          third worker
    OwnedObject: its object and forks  <------   a fork: one RRef object
                                                 sends it, and keeps its own -->  a fork of its own
                                       <------------------------------------      "add my fork"
                                       ------------------------------------->     "it is added"
                                                 may drop its own       <------   "I have mine"
    the last fork is dropped: so is the object

A fork is an RRef object on one worker. An object lives as long as it has forks, or its owner itself has an RRef to it.
No lock is owned while the user's code may run. The forks of a lost worker are dropped.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Any

from torch.futures import Future

RRefId = tuple[int, int]  # the uid of the worker that created the id, and a serial number on that worker


class OwnedObject:
    """An `OwnedObject` is an object of this worker and its forks. `future` resolves to the object, or to its error."""

    __slots__ = ("forks", "future", "id", "is_made")

    def __init__(self, rref_id: RRefId) -> None:
        self.id = rref_id
        self.future: Future[Any] = Future()
        self.forks: dict[RRefId, int] = {}  # by fork: the uid of the worker that has the fork
        self.is_made = False  # False while the object is expected: a reference came before the call that makes it


class References:
    """`References` are one worker's tables of owned objects and of references being sent."""

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._owned: dict[RRefId, OwnedObject] = {}
        # by the fork that was sent: the reference to keep until the fork arrives, and the uid of the receiver
        self._kept_forks: dict[RRefId, tuple[Any, int]] = {}
        self.dropped: deque[tuple[int, RRefId, RRefId]] = deque()  # (owner, object, fork), appended by finalizers
        self._lost: set[int] = set()

    def new_id(self) -> RRefId:
        """Return an id that is unique among all workers."""
        return self._uid, next(self._numbers)

    def make(self, rref_id: RRefId, fork: RRefId | None = None, holder: int = 0) -> OwnedObject:
        """Create the object with this id, unless it is expected already; `fork` is a reference of worker `holder`."""
        with self._lock:
            owned = self._owned.get(rref_id) or OwnedObject(rref_id)
            owned.is_made = True
            if fork is not None and holder not in self._lost:
                owned.forks[fork] = holder
                self._owned[rref_id] = owned
            return owned

    def find_or_expect(self, rref_id: RRefId) -> OwnedObject | None:
        """Return the object with this id; expect the object if the call that makes it may not have arrived yet.

        The worker that made the call may have sent the reference on another connection. None: the object is gone.
        """
        with self._lock:
            owned = self._owned.get(rref_id)
            if owned is None and rref_id[0] != self._uid and rref_id[0] not in self._lost:
                owned = self._owned[rref_id] = OwnedObject(rref_id)
            return owned

    def add_fork(self, owned: OwnedObject, fork: RRefId, holder: int) -> None:
        """Add a reference of the worker `holder` to an object."""
        with self._lock:
            if holder not in self._lost:
                owned.forks[fork] = holder
                self._owned[owned.id] = owned

    def announce_fork(self, rref_id: RRefId, fork: RRefId, holder: int) -> bool:
        """Add a reference that `holder` received from another worker; return False if the object is gone.

        The reference may have been sent before this worker received the call that makes the object.
        """
        with self._lock:
            owned = self._owned.get(rref_id)
            if owned is None:
                if rref_id[0] == self._uid or rref_id[0] in self._lost:
                    return False
                owned = self._owned[rref_id] = OwnedObject(rref_id)
            if holder not in self._lost:
                owned.forks[fork] = holder
            return True

    def drop_fork(self, rref_id: RRefId, fork: RRefId) -> OwnedObject | None:
        """Drop a reference; if it was the last one, return the object, to be released outside all locks."""
        with self._lock:
            owned = self._owned.get(rref_id)
            if owned is None:
                return None
            owned.forks.pop(fork, None)
            # The call that makes the object may still be in flight: it must find the future that others wait for.
            return self._owned.pop(rref_id) if not owned.forks and owned.is_made else None

    def keep_fork(self, fork: RRefId, reference: Any, to: int) -> None:
        """Keep a reference until the worker `to` has its own fork."""
        with self._lock:
            if to not in self._lost:
                self._kept_forks[fork] = reference, to

    def release_fork(self, fork: RRefId) -> Any:
        """Return the reference that was kept until this fork arrived, to be released outside all locks."""
        with self._lock:
            return self._kept_forks.pop(fork, None)

    def lose(self, uid: int) -> tuple[list[Any], list[OwnedObject]]:
        """Drop the references of a lost worker.

        Return the objects to release outside all locks, and the expected objects that the lost worker will never make.
        """
        freed: list[Any] = []
        orphans: list[OwnedObject] = []
        with self._lock:
            self._lost.add(uid)
            for fork in [fork for fork, (_, to) in self._kept_forks.items() if to == uid]:
                freed.append(self._kept_forks.pop(fork))
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
        """Return the number of objects, of forks, and of references kept for forks in flight."""
        with self._lock:
            return {
                "num_owner_rrefs": len(self._owned),
                "num_forks": sum(len(owned.forks) for owned in self._owned.values()),
                "num_pending_children": len(self._kept_forks),
            }

    def clear(self) -> list[OwnedObject]:
        """Release everything, because the worker ends."""
        with self._lock:
            owned, self._owned = list(self._owned.values()), {}
            self._kept_forks = {}
            return owned
