"""Add a MAC to the pickles that torch sends as plain tensors, in groups of ours that span hosts.

ZeroRedundancyOptimizer.consolidate_state_dict    goes through `broadcast_object_list`, which authenticates
PGTransport, of torch.distributed.checkpoint      sends a MAC for each receiver before the pickle of its metadata
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pickle
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx._base.torch_names import resolve
from phalanx._comm.backend.torch_integration.groups import pickle_authenticator
from phalanx._comm.backend.torch_integration.late_modules import call_once_imported
from phalanx._comm.backend.torch_integration.patch import patch
from phalanx._comm.transport.authentication import OVERHEAD_BYTES, PickleAuthenticator, PickleStream
from phalanx.errors import PhalanxError

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_PG_TRANSPORT = "torch.distributed.checkpoint._pg_transport"


def authenticate_pickles_in_tensors() -> None:
    """Add a MAC to these pickles between hosts, once a program imports the modules that send them."""
    call_once_imported(_ZERO, _authenticate_zero)
    call_once_imported(_PG_TRANSPORT, _authenticate_pg_transport)


@patch(
    f"{_ZERO}._broadcast_object(obj, src_rank, group, device)",
    loses="states that torch's ZeroRedundancyOptimizer sends between hosts are pickles without a MAC",
)
def _authenticate_zero() -> None:
    module: Any = resolve(_ZERO)
    original = module._broadcast_object
    cpu = torch.device("cpu")

    @functools.wraps(original)
    def _broadcast_object(obj: Any, src_rank: int, group: Any = None, device: torch.device = cpu) -> Any:
        if pickle_authenticator(group) is None:
            return original(obj, src_rank, group, device)
        is_source = dist.get_rank() == src_rank
        objects: list[Any] = [None]
        if is_source:
            saved = io.BytesIO()
            torch.save(obj, saved)
            objects = [saved.getvalue()]
        dist.broadcast_object_list(objects, src=src_rank, group=group, device=device)
        return obj if is_source else torch.load(io.BytesIO(objects[0]), map_location=device, weights_only=False)

    module._broadcast_object = _broadcast_object


@patch(
    f"{_PG_TRANSPORT}.PGTransport.send_checkpoint(self, dst_ranks, state_dict)",
    f"{_PG_TRANSPORT}.PGTransport.recv_checkpoint(self, src_rank)",
    f"{_PG_TRANSPORT}.pickle",
    loses="PGTransport sends the metadata of a checkpoint between hosts as a pickle without a MAC",
)
def _authenticate_pg_transport() -> None:
    module: Any = resolve(_PG_TRANSPORT)
    module.pickle = _Pickle()
    transport = module.PGTransport
    send, receive = transport.send_checkpoint, transport.recv_checkpoint

    @functools.wraps(send)
    def send_checkpoint(self: Any, dst_ranks: list[int], state_dict: object) -> None:
        with _transfer(self._pg, dst_ranks=dst_ranks):
            send(self, dst_ranks, state_dict)

    @functools.wraps(receive)
    def recv_checkpoint(self: Any, src_rank: int) -> object:
        with _transfer(self._pg, src_rank=src_rank):
            return receive(self, src_rank)

    transport.send_checkpoint, transport.recv_checkpoint = send_checkpoint, recv_checkpoint


class _Pickle:
    """A `_Pickle` replaces the module `pickle` in PGTransport's module: a transfer's pickles get MACs.

        number of receivers | for each: its rank, and a message with the hash of the pickle | pickle

    All receivers get the same pickle, and each has its own stream.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    def dumps(self, obj: Any, *args: Any, **kwargs: Any) -> bytes:
        """Return the pickle of an object, with a MAC for each receiver."""
        data = pickle.dumps(obj, *args, **kwargs)
        transfer = _running.transfer
        if transfer is None:
            return data
        hashed = _hash(data)
        heads = [
            _RANK.pack(dst) + transfer.pickles.send(hashed, PickleStream("PGTransport", transfer.rank, dst))
            for dst in transfer.dst_ranks
        ]
        return b"".join((_RANK.pack(len(heads)), *heads, data))

    def loads(self, data: bytes, *args: Any, **kwargs: Any) -> Any:
        """Return the object in a pickle.

        Raises:
            PhalanxError: the pickle has no MAC for this rank, or a wrong one.
        """
        transfer = _running.transfer
        return pickle.loads(data if transfer is None else transfer.verify(data), *args, **kwargs)


_RANK = struct.Struct("<q")
_HASH_BYTES = 32
_HEAD_BYTES = _RANK.size + OVERHEAD_BYTES + _HASH_BYTES


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()


@dataclass(frozen=True)
class _Transfer:
    """A `_Transfer` is a checkpoint that this rank sends to others, or receives from another rank."""

    pickles: PickleAuthenticator
    rank: int
    dst_ranks: Sequence[int]
    src_rank: int

    def verify(self, data: bytes) -> bytes:
        stream = PickleStream("PGTransport", self.src_rank, self.rank)
        number = _RANK.unpack_from(data)[0] if len(data) >= _RANK.size else 0
        end = _RANK.size + number * _HEAD_BYTES
        for at in range(_RANK.size, end if end <= len(data) else 0, _HEAD_BYTES):
            if _RANK.unpack_from(data, at)[0] == self.rank:
                hashed = self.pickles.receive(data[at + _RANK.size : at + _HEAD_BYTES], stream)
                if hashed == _hash(data[end:]):
                    return data[end:]
        raise PhalanxError(
            f"PGTransport.recv_checkpoint: the metadata from rank {self.src_rank} has a wrong MAC, or none. It was "
            "not unpickled.\n"
            "Its bytes were changed in transit, or somebody without the group's key sent it (`phalanx docs security`)."
        )


@contextlib.contextmanager
def _transfer(group: Any, dst_ranks: Sequence[int] = (), src_rank: int = -1) -> Iterator[None]:
    pickles, outer = pickle_authenticator(group), _running.transfer
    _running.transfer = None if pickles is None else _Transfer(pickles, group.rank(), dst_ranks, src_rank)
    try:
        yield
    finally:
        _running.transfer = outer


class _Running(threading.local):
    """A `_Running` holds this thread's current transfer."""

    transfer: _Transfer | None = None


_running = _Running()
