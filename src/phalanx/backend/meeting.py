"""How the ranks of a new group find each other: through the job's store, once, before anything is shared.

    every rank   set  rank/<r>  = who and where I am, and a token under which I can be found
    rank 0       get  rank/*    → set  seats = all of them, or why it gave up
    every rank   get  seats     → the ranks of one host meet at the token of the first of them

Rank 0 looks at who is missing, so that every rank can name them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.arena.watch import ProcessId
from phalanx.deadline import Deadline
from phalanx.errors import DeadlineError, PhalanxError
from phalanx.log import get_logger, warn_once

_logger = get_logger(__name__)
_LONGEST_PAUSE_S = 0.02
_FAREWELL_S = 1.0
NOTICE_S = 5.0


class Store(Protocol):
    """What a meeting needs of torch's store."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """The value; blocks until it is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...


@dataclass(frozen=True)
class Seat:
    """One rank as the others see it."""

    host: str
    hostname: str
    token: str
    process: ProcessId
    cpus: frozenset[int]
    core: int  # version of the C core's layout; 0 without it
    address: str = ""  # of this host, as the others can reach it; empty where the job's store has no address either
    agreed: str = ""  # what must be the same on every rank
    obstacle: str = ""  # why this process can share no memory

    def to_json(self) -> dict[str, Any]:
        """Plain data for the store."""
        p = self.process
        return {
            "host": self.host,
            "hostname": self.hostname,
            "token": self.token,
            "process": [p.pid, p.start_ticks, p.namespace, p.has_pidfds],
            "cpus": sorted(self.cpus),
            "core": self.core,
            "address": self.address,
            "agreed": self.agreed,
            "obstacle": self.obstacle,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Seat:
        """The opposite of `to_json`."""
        return cls(
            data["host"],
            data["hostname"],
            data["token"],
            ProcessId(*data["process"]),
            frozenset(data["cpus"]),
            data["core"],
            data["address"],
            data["agreed"],
            data["obstacle"],
        )


def host_identity() -> str:
    """What two processes have in common when they can share memory through us: a kernel, network, and user.

    A host's name proves nothing: two hosts may have one name, and containers of one host may have two. The memory is
    handed over through a socket of the network namespace, to a user of the user namespace. Pid namespaces do not
    matter.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            boot = f.read().strip()
        network, users = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user"))
        return f"{boot} {network} {users} {os.getuid()}"
    except (FileNotFoundError, PermissionError) as error:
        warn_once(
            _logger,
            f"backend 'phalanx': {error.filename} cannot be read, so nobody knows which ranks are on this host: "
            "this one shares memory with none. Mount /proc.",
        )
        return f"pid-{os.getpid()}-{os.urandom(8).hex()}"


def meet(store: Store, rank: int, world_size: int, mine: Seat, group: str, deadline: Deadline) -> list[Seat]:
    """All seats of the group, by rank; the same list on every rank.

    Raises:
        DeadlineError: some rank never came; `missing` says which, on every rank that did.
    """
    keys = [f"rank/{r}" for r in range(world_size)]
    store.set(keys[rank], json.dumps(mine.to_json()))
    if rank == 0:
        missing = _await_all(store, keys, group, deadline)
        if missing:
            store.set("seats", json.dumps({"missing": missing, "timeout_s": deadline.timeout_s}))
            part(store, rank, [r for r in range(world_size) if r not in missing])
            raise _never_came(group, missing, world_size, deadline.timeout_s)
        seats = [json.loads(store.get(key)) for key in keys]
        store.set("seats", json.dumps({"seats": seats}))
        return [Seat.from_json(seat) for seat in seats]
    # Rank 0 says who is missing; a little more time than it has, or both would give up at once.
    patience = Deadline.after(min(deadline.left_s + 2.0, 1e9), deadline.clock)
    if not _await(store, ["seats"], patience, lambda: _logger.warning(_waiting(group, [0], deadline, patience))):
        raise _never_came(group, [0], world_size, deadline.timeout_s)
    answer = json.loads(store.get("seats"))
    if "missing" in answer:
        part(store, rank, [])
        raise _never_came(group, answer["missing"], world_size, answer["timeout_s"])
    return [Seat.from_json(seat) for seat in answer["seats"]]


def part(store: Store, rank: int, others: Sequence[int]) -> None:
    """The meeting has failed and all ranks will say why: rank 0, whose process may be the store's, goes last.

    `others` are the ranks that it waits for, a moment: without the store they could say only that the store is gone.
    """
    if rank == 0:
        heard = [f"heard/{r}" for r in others if r != 0]
        _await(store, heard, Deadline.after(_FAREWELL_S), lambda: None)
    else:
        with contextlib.suppress(RuntimeError):  # it is gone already
            store.set(f"heard/{rank}", "")


def _await_all(store: Store, keys: list[str], group: str, deadline: Deadline) -> list[int]:
    """Wait for all keys; the indices of those that never came."""

    def missing() -> list[int]:
        return [r for r, key in enumerate(keys) if not store.check([key])]

    if _await(store, keys, deadline, lambda: _logger.warning(_waiting(group, missing(), deadline, deadline))):
        return []
    return missing()


def _await(store: Store, keys: list[str], deadline: Deadline, notice: Callable[[], None]) -> bool:
    """Ask for `keys` until they are there; `notice` is called once, after five seconds.

    Asking, because a store's own `wait` cannot be interrupted by Ctrl-C, counts in whole seconds where the store is a
    file, and has TCPStore print a warning whenever it ends without the key.
    """
    said = Deadline.after(NOTICE_S, deadline.clock)
    spoken, pause_s = False, 0.0005
    while True:
        try:
            if store.check(keys):
                return True
        except RuntimeError as error:  # DistNetworkError: whoever keeps the store has ended
            raise PhalanxError(f"init_process_group: the store of the job is gone: {error}") from None
        if deadline.passed:
            return False
        if said.passed and not spoken:
            spoken = True
            notice()
        time.sleep(min(pause_s, deadline.left_s))
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def _waiting(group: str, missing: list[int], deadline: Deadline, patience: Deadline) -> str:
    waited = patience.timeout_s - patience.left_s
    return (
        f"init_process_group of group {group!r}: waiting for {ranks(missing)} for {waited:.0f} s; "
        f"giving up after {deadline.timeout_s:.0f} s."
    )


def _never_came(group: str, missing: list[int], world_size: int, timeout_s: float) -> DeadlineError:
    return DeadlineError(
        f"init_process_group of group {group!r}: {ranks(missing)} of {world_size} never came within "
        f"{timeout_s:.1f} s.\n"
        f"Check that {world_size} processes were started and that each reached init_process_group; "
        "the log of a missing rank comes first.",
        missing=tuple(missing),
    )


def ranks(which: Sequence[int]) -> str:
    """'rank 3' or 'ranks 1, 3, 5'."""
    return f"rank {which[0]}" if len(which) == 1 else "ranks " + ", ".join(map(str, which))
