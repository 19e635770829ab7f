"""Copy tensors from one rank to the ranks that lack them: through memory on a host, by messages between hosts.

    round 1    source ──read by──▶ receivers of its host        source ──messages──▶ first receiver of another host
    round 2                                                     that rank ──read by──▶ the other receivers of its host

After each round all ranks report what has arrived. `extended_timeout` raises the group's timeout for the transfer,
which may take longer than any operation of the group should.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx._comm.rendezvous.rank_info import host_identity
from phalanx._comm.symmetric_memory.process_memory import Copy, read_process, readable
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx._comm.transport.tensors import is_dense
from phalanx.elastic.buffers import room_for, views_of

_SMALL = 1 << 16  # smaller tensors are packed; larger ones are sent as they are
_SLOWEST_BYTES_PER_S = 8 << 20  # assumed for the slowest link, or an overloaded machine


@dataclass(frozen=True)
class TransferPeer:
    """A `TransferPeer` is a rank in a transfer: its host, its process, and the addresses of its pieces.

    `addresses` is None if some piece is not in CPU memory.
    """

    host: str
    process: ProcessId
    addresses: tuple[int, ...] | None

    def can_read(self, other: TransferPeer) -> bool:
        """Return whether this rank may be able to read the memory of `other`."""
        mine, theirs = self.process.namespace, other.process.namespace
        return (
            self.host == other.host
            and bool(mine)
            and mine == theirs
            and self.addresses is not None
            and other.addresses is not None
        )


@dataclass(frozen=True)
class TransferPlan:
    """A `TransferPlan` is how one receiver gets the bytes in a round: by reading `holder`'s memory, or by messages."""

    receiver: int
    holder: int
    reads: bool


def plan_round(
    peers: Mapping[int, TransferPeer], source: int, holders: Collection[int], needing: Collection[int],
    refused: Collection[int],
) -> list[TransferPlan]:  # fmt: skip
    """Return which ranks receive the bytes in this round, and from whom; empty if no rank needs them.

    The ranks in `refused` could not read another process's memory.
    """
    moves: list[TransferPlan] = []
    awaited: set[int] = set()
    for receiver in sorted(needing):
        mine = peers[receiver]
        near = [h for h in sorted(holders) if mine.can_read(peers[h])] if receiver not in refused else []
        if near:
            moves.append(TransferPlan(receiver, near[0], reads=True))
            continue
        if receiver not in refused and any(mine.can_read(peers[other]) for other in awaited):
            continue  # the first rank of that host is already a receiver
        awaited.add(receiver)
        moves.append(TransferPlan(receiver, source, reads=False))
    return moves


def transfer_tensors(tensors: Sequence[Tensor], source: int, receivers: Collection[int], group: Any) -> None:
    """Copy the tensors of `source` to the tensors of `receivers`. All ranks call this.

    The tensors have the same forms on the source and on all receivers; other ranks' tensors stay unchanged.
    """
    me = group.rank()
    takes_part = me == source or me in receivers
    payload = _Payload(tensors if takes_part else ())
    if me == source:
        payload.pack()
    with readable() if takes_part else contextlib.nullcontext():
        gathered = _gather(
            TransferPeer(host_identity(), ProcessId.of_self(), payload.addresses) if takes_part else None, group
        )
        peers = {rank: peer for rank, peer in enumerate(gathered) if peer is not None}
        holders, needing = {source}, set(receivers)
        refused: set[int] = set()
        while needing:
            moves = plan_round(peers, source, holders, needing, refused)
            arrived = True
            for move in moves:
                if move.reads:
                    arrived = payload.read(peers[move.holder]) if move.receiver == me else arrived
                elif move.holder == me:
                    payload.send(move.receiver, group)
                elif move.receiver == me:
                    payload.receive(move.holder, group)
            results = _gather(arrived, group)
            for move in moves:
                if results[move.receiver]:
                    needing.discard(move.receiver)
                    holders.add(move.receiver)
                else:
                    refused.add(move.receiver)
    if me in receivers:
        payload.unpack()


@contextlib.contextmanager
def extended_timeout(group: Any, nbytes: int) -> Iterator[None]:
    """Extend the timeout of `group` by the longest time that moving `nbytes` may take; the same on all ranks."""
    ours = phalanx_group(group)
    assert ours is not None  # elastic.run forms no other groups
    timeout_s = ours.timeout_s
    ours.set_timeout(timedelta(seconds=timeout_s + nbytes / _SLOWEST_BYTES_PER_S))
    try:
        yield
    finally:
        ours.set_timeout(timedelta(seconds=timeout_s))


def _gather(value: Any, group: Any) -> list[Any]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


class _Payload:
    """A `_Payload` holds the tensors of a transfer: large dense ones as they are, all others packed into one piece.

    Both sides know the tensors' forms.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        large = [t for t in tensors if t.nbytes >= _SMALL and is_dense(t)]
        self._small = [t for t in tensors if t.nbytes and not (t.nbytes >= _SMALL and is_dense(t))]
        packed = torch.empty(room_for(self._small), dtype=torch.uint8, device="cpu")
        self._places = views_of([(t.shape, t.dtype) for t in self._small], packed)
        self._pieces = [t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in large]
        self._pieces += [packed] if self._small else []

    @property
    def addresses(self) -> tuple[int, ...] | None:
        """Return the addresses of the pieces in this process; None if some piece is not in CPU memory."""
        if any(piece.device.type != "cpu" for piece in self._pieces):
            return None
        return tuple(piece.data_ptr() for piece in self._pieces)

    def pack(self) -> None:
        """Pack the small tensors into one piece."""
        for place, tensor in zip(self._places, self._small, strict=True):
            place.copy_(tensor)

    def unpack(self) -> None:
        """Copy the small tensors from the piece to their places."""
        for place, tensor in zip(self._places, self._small, strict=True):
            tensor.copy_(place)

    def read(self, holder: TransferPeer) -> bool:
        """Read the pieces from the memory of `holder`; return whether all could be read."""
        assert holder.addresses is not None
        copies = [
            Copy(piece.data_ptr(), address, piece.nbytes)
            for piece, address in zip(self._pieces, holder.addresses, strict=True)
        ]
        try:
            read_process(holder.process.pid, copies)
        except OSError:  # a container's seccomp filter, or another user; if the process has ended, the group reports it
            return False
        return True

    def send(self, receiver: int, group: Any) -> None:
        """Send the bytes to `receiver` as messages of the group."""
        for piece in self._pieces:
            dist.send(piece, group=group, group_dst=receiver)

    def receive(self, holder: int, group: Any) -> None:
        """Receive the bytes from `holder` as messages of the group."""
        for piece in self._pieces:
            dist.recv(piece, group=group, group_src=holder)
