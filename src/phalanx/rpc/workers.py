"""`Workers` are the members of RPC: fixed from the start in a job of fixed size, else read from the job's store."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from phalanx._base.deadline import Deadline
from phalanx._comm.control.address import Address
from phalanx.errors import DeadlineError, MismatchError, PhalanxError
from phalanx.rpc.worker_info import WorkerAddress, WorkerInfo

_NOBODY = "-"  # the entry of a worker that has left
_PROBE_S = 1.0
_WAIT_S = 5.0  # the longest single wait in the store: Ctrl-C is handled between two waits


class Workers:
    """`Workers` are the job's workers, by name, rank and uid. `world_size` is None if workers join and leave."""

    def __init__(self, store: Any, world_size: int | None) -> None:
        self._store = store
        self.world_size = world_size
        self._lock = threading.Lock()
        self._by_uid: dict[int, WorkerAddress] = {}
        self._by_name: dict[str, WorkerAddress] = {}
        self._gone: set[int] = set()
        self._lost: dict[str, WorkerAddress] = {}
        self._looked_up: set[int] = set()  # workers that the store had when they were first called

    @property
    def is_static(self) -> bool:
        return self.world_size is not None

    def join(self, me: WorkerAddress, deadline: Deadline, open_network: Callable[[], WorkerAddress]) -> None:
        """Become a member; in a job of fixed size, wait for all others.

        `open_network` is called if the workers are on several hosts; it opens the port for workers on other hosts.

        Raises:
            MismatchError: another worker has the name or the rank.
            DeadlineError: some worker has not joined in time.
            PhalanxError: the job's store failed.
        """
        if self.world_size is None:
            self._join_others(me)
            return
        self._store.set(f"worker/{me.info.id}", me.to_json())
        found = []
        for rank in range(self.world_size):
            found.append(self._wait_for(rank, me, deadline))
        for member in found:
            self.add(member)
        self._compare(me, found)
        if len({one.host for one in found}) > 1:
            me = open_network()
            self._store.set(f"reachable/{me.info.id}", me.to_json())
            for rank in range(self.world_size):
                self.add(self._wait_for(rank, me, deadline, "reachable"))

    @staticmethod
    def _compare(me: WorkerAddress, found: Sequence[WorkerAddress]) -> None:
        twice = {one.info.name for one in found if sum(o.info.name == one.info.name for o in found) > 1}
        if twice:
            ranks = {m.info.id: m.info.name for m in found if m.info.name in twice}
            raise MismatchError(
                f"init_rpc on rank {me.info.id}: RPC worker name is not unique: "
                + ", ".join(f"rank {rank} is {name!r}" for rank, name in ranks.items())
                + ".\nGive each worker a name of its own.",
                calls={rank: f"init_rpc({name!r})" for rank, name in ranks.items()},
            )
        mine = found[me.info.id]
        if mine.uid != me.uid:
            raise MismatchError(
                f"init_rpc: two processes are rank {me.info.id} of {len(found)}:\n  {mine}\n  {me}\n"
                "Give each process a rank of its own."
            )

    def _wait_for(self, rank: int, me: WorkerAddress, deadline: Deadline, what: str = "worker") -> WorkerAddress:
        key = f"{what}/{rank}"
        while True:
            try:
                self._store.wait([key], timedelta(seconds=min(max(deadline.left_s, 0.001), _WAIT_S)))
                return WorkerAddress.from_json(self._store.get(key))
            except RuntimeError as error:
                if not deadline.passed and "timeout" in str(error).lower():  # every store's timeout has this word
                    continue
                if not deadline.passed:
                    raise PhalanxError(f"init_rpc on rank {me.info.id}: the job's store failed: {error}") from error
                missing = tuple(r for r in range(self.world_size or 0) if not self._store.check([f"{what}/{r}"]))
                raise DeadlineError(
                    f"init_rpc of worker {me.info.name!r} (rank {me.info.id}): no answer from "
                    f"{', '.join(f'rank {r}' for r in missing)} within {deadline.timeout_s:.1f} s.\n"
                    "Each of the job's processes has to call init_rpc; read the log of a missing one first.",
                    missing=missing,
                ) from None

    def _join_others(self, me: WorkerAddress) -> None:
        """Register the name in the store; raise if a living worker has the name or the rank."""
        key, mine = f"name/{me.info.name}", me.to_json()
        while True:
            before = self._store.get(key).decode() if self._store.check([key]) else ""
            for other in self._read():
                same_name = other.info.name == me.info.name
                if (same_name or other.info.id == me.info.id) and not _is_gone(other, me):
                    raise MismatchError(
                        f"init_rpc of {me}: RPC worker {'name' if same_name else 'rank'} is not unique: {other} has it."
                        "\nGive each worker a name and a rank of its own."
                    )
            is_new = not self._store.check([key])
            if self._store.compare_set(key, before, mine).decode() == mine:
                break
        if is_new:
            self._store.set(f"slot/{self._store.add('slots', 1)}", me.info.name)
        for member in self._read():
            self.add(member)

    def _read(self) -> list[WorkerAddress]:
        """Return all workers in the store."""
        found = []
        for slot in range(1, self._store.add("slots", 0) + 1):
            key = f"name/{self._store.get(f'slot/{slot}').decode()}"
            if self._store.check([key]) and (member := self._parse(self._store.get(key))) is not None:
                found.append(member)
        return found

    def _parse(self, text: bytes) -> WorkerAddress | None:
        member = WorkerAddress.from_json(text) if text != _NOBODY.encode() else None
        return None if member is not None and member.uid in self._gone else member

    def add(self, member: WorkerAddress) -> None:
        """Add a worker found in the store or announced by its own hello, unless it was lost meanwhile."""
        with self._lock:
            if member.uid in self._gone:
                return
            self._by_uid[member.uid] = member
            self._by_name[member.info.name] = member

    def forget(self, member: WorkerAddress) -> None:
        """Record a worker that is lost or has left; if workers join and leave, free its name for another worker."""
        with self._lock:
            self._gone.add(member.uid)
            self._looked_up.discard(member.uid)
            if not self.is_static:
                known = self._by_name.get(member.info.name)
                if known is not None and known.uid == member.uid:  # a later worker may have the name
                    del self._by_name[member.info.name]
                self._by_uid.pop(member.uid, None)
                self._lost[member.info.name] = member

    def leave(self, me: WorkerAddress) -> None:
        if not self.is_static:
            key = f"name/{me.info.name}"
            self._store.compare_set(key, me.to_json(), _NOBODY)

    def members(self) -> list[WorkerAddress]:
        """Return all workers; if workers join and leave, those that are in the store now."""
        if not self.is_static:
            return sorted(self._read(), key=lambda one: one.info.id)
        with self._lock:
            return sorted(self._by_name.values(), key=lambda one: one.info.id)

    def by_uid(self, uid: int) -> WorkerAddress | None:
        """Return the worker with this uid, if it is known."""
        return self._by_uid.get(uid)

    def host_of(self, name: str) -> str:
        """Return the identity of a worker's host, also for a lost worker; empty for an unknown one."""
        member = self.find(name) or self.find_lost(name)
        return "" if member is None else member.host

    def find_lost(self, to: str | int | WorkerInfo) -> WorkerAddress | None:
        """Return the lost worker with this name or rank, if any."""
        name = to.name if isinstance(to, WorkerInfo) else to
        return next((one for one in self._lost.values() if name in (one.info.name, one.info.id)), None)

    def find(self, to: str | int | WorkerInfo) -> WorkerAddress | None:
        """Return the worker with this name or rank; if workers join and leave, look up unknown ones in the store."""
        name = to.name if isinstance(to, WorkerInfo) else to
        if isinstance(name, str):
            known = self._by_name.get(name)
            return known if self.world_size is not None else self._confirm(name, known)
        for member in list(self._by_name.values()):
            if member.info.id == name:
                if self.world_size is not None:
                    return member
                confirmed = self._confirm(member.info.name, member)
                if confirmed is not None and confirmed.info.id == name:
                    return confirmed
        if not self.is_static:
            for member in self._read():
                self.add(member)
                if member.info.id == name:
                    return member
        return None

    def _confirm(self, name: str, known: WorkerAddress | None) -> WorkerAddress | None:
        """Return the worker of this name, before its first call as the store has it.

        A worker that leaves says goodbye to those that it is connected to, and another one may have its name since.
        """
        if known is not None and known.uid in self._looked_up:
            return known
        try:
            member = self._parse(self._store.get(f"name/{name}")) if self._store.check([f"name/{name}"]) else None
        except RuntimeError:  # the store's process has ended, and the workers go on
            return known
        if known is not None and (member is None or member.uid != known.uid):
            self.forget(known)
        if member is not None:
            self.add(member)
            self._looked_up.add(member.uid)
        return member


def _is_gone(other: WorkerAddress, me: WorkerAddress) -> bool:
    """Return whether a worker in the store has ended without leaving."""
    if other.host == me.host:
        return other.process.has_ended()
    with contextlib.suppress(OSError, ValueError):
        address = Address.parse(other.network)
        socket.create_connection((address.host, address.port), _PROBE_S).close()
        return False
    return True
