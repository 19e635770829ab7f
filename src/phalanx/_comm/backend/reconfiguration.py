"""`Reconfiguration` replaces the members of an existing group (`torch.distributed._reconfigure`, torch 2.14 and later).

A group that was created with `enable_reconfigure` has no peers at first. The program exchanges the processes' handles.
Each future member calls `reconfigure` with the same handles and a new uuid. The members form the group in the store
with which it was created, under a prefix with that uuid. A process that is left out calls nothing, and loses its peers.
"""

from __future__ import annotations

import secrets
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore

from phalanx._comm.transport.base import Transport
from phalanx._comm.transport.rehearsal import RefusingTransport
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx._comm.backend.process_group import PhalanxProcessGroup

_NEVER = -1


@dataclass(frozen=True, order=True)
class MemberHandle:
    """A `MemberHandle` has a member's rank and the uuid of the call that set the rank, its first rank, and a token."""

    rank: int
    uuid: int
    first_rank: int
    token: str

    def __str__(self) -> str:
        """Return the handle as text, in Gloo's format: 'phalanx:0:17:0:d3b0'."""
        return f"phalanx:{self.rank}:{self.uuid}:{self.first_rank}:{self.token}"

    @classmethod
    def parse(cls, text: str) -> MemberHandle:
        """Parse the result of `str(handle)`.

        Raises:
            PhalanxError: `text` is not a handle.
        """
        try:
            kind, rank, uuid, first_rank, token = text.split(":")
            if kind != "phalanx" or not token:
                raise ValueError
            return cls(int(rank), int(uuid), int(first_rank), token)
        except ValueError:
            raise PhalanxError(
                f"reconfigure: {text!r} is not a handle of backend 'phalanx'.\n"
                "Pass what torch.distributed._get_reconfigure_handle() returned on each member."
            ) from None


def order_handles(handles: list[str] | set[str], own: str) -> list[str]:
    """Return the handles in the order of the new ranks: a list unchanged, a set in the order of the current ranks.

    Raises:
        PhalanxError: there is no handle, a handle is repeated or invalid, or `own` is missing.
    """
    parsed = {text: MemberHandle.parse(text) for text in handles}
    if not handles:
        raise PhalanxError("reconfigure: no handles; pass the handle of each member, including this process.")
    if len(parsed) != len(handles):
        raise PhalanxError("reconfigure: a handle is repeated; pass each member's handle once.")
    if own not in parsed:
        raise PhalanxError(
            f"reconfigure: this process's handle {own} is not among the {len(handles)} handles.\n"
            "Handles change with each reconfiguration: exchange the current handles. "
            "A process that leaves must not call reconfigure."
        )
    return list(handles) if isinstance(handles, list) else sorted(parsed, key=parsed.__getitem__)


def unconnected(group: str, rank: int, world_size: int) -> RefusingTransport:
    """Return the transport of a group without peers, which refuses all operations."""

    def explain(where: str) -> str:
        return (
            f"group {group!r} on rank {rank}: an operation{where} before the group has members.\n"
            "With enable_reconfigure=True, or after a failed reconfiguration, first call "
            "torch.distributed._reconfigure on all members, with a new uuid."
        )

    return RefusingTransport(group, rank, world_size, explain)


class Reconfiguration:
    """A `Reconfiguration` replaces the members of one process's group.

    Arguments:
        open_transport: opens a transport to the members, from torch's options.
    """

    def __init__(self, store: Any, first_rank: int, open_transport: Callable[[Any], Transport]) -> None:
        self._store = store
        self._first_rank = first_rank
        self._open_transport = open_transport
        self._token = secrets.token_hex(8)  # another process may start with the same rank later
        self._uuid = _NEVER
        self._used: set[int] = set()

    def handle(self, group: PhalanxProcessGroup) -> str:
        """Return this process's handle; it changes with each reconfiguration."""
        return str(MemberHandle(group.rank(), self._uuid, self._first_rank, self._token))

    def apply(self, group: PhalanxProcessGroup, opts: Any) -> None:
        """Leave the group's members, and connect to the members with `opts.handles`, which all call this.

        Raises:
            PhalanxError: the handles are invalid, or the uuid was used before; the group is unchanged.
            DeadlineError: some member did not join in time; the group has no peers until the next call.
        """
        own = self.handle(group)
        handles = order_handles(opts.handles, own)
        uuid, rank, size = opts.uuid, handles.index(own), len(handles)
        store = PrefixStore(f"reconfigure/{uuid}/", self._store)
        if uuid in self._used or (rank == 0 and store.add("claimed", 1) > 1):
            raise PhalanxError(f"reconfigure: uuid {uuid} is already used; each call needs a new one.")
        self._used.add(uuid)
        options = types.SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            timeout=opts.timeout if opts.timeout is not None else timedelta(seconds=group.timeout_s),
            group_id=group.group_name,
            global_ranks_in_group=[],
        )
        instead = unconnected(group.group_name, group.rank(), group.size())
        group.reconnect(lambda: self._open_transport(options), instead, store, rank, size)
        self._uuid = uuid
