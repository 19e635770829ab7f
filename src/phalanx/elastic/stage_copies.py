"""Copy what each rank of a Pipeline has kept of a commit to a rank of the next host, so that a whole host may be lost.

    rank b, host B    keeps commit k in its slot    ── structure (with a MAC), tensors ──▶    rank c, host C
    all ranks         barrier: a rank that passes it knows that every slot of commit k is written, and every copy

The last host copies to the first one. A stage is lost with its copy if both of these hosts are lost at once.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.pickles import pickle_authenticator
from phalanx._comm.transport.authentication import PickleStream
from phalanx.elastic.carry import own_clock
from phalanx.elastic.record_copies import plan_keepers, plan_wards
from phalanx.errors import PhalanxError
from phalanx.optim.kept_state import KeptState

_TAG = 999_999  # above what programs use on the same group, and below what pipelines do
_HEAD = struct.Struct("<qQ")  # the number of the commit (-1: there was no room for it), and the bytes of its tensors
_STREAM = "kept stage"


class StageCopies:
    """`StageCopies` sends what this rank keeps to its keeper, and receives the copies of its wards.

    `hosts` are the ranks of the group by host.
    """

    def __init__(self, group: Any, hosts: Sequence[Sequence[int]]) -> None:
        keepers = plan_keepers(hosts, num_copies=1)
        authenticator = pickle_authenticator(group)
        assert authenticator is not None  # there are several hosts
        self.wards: Mapping[int, Sequence[int]] = plan_wards(keepers)
        """It maps each rank to its wards, the ranks whose copies that rank keeps."""
        self._group, self._authenticator = group, authenticator
        self._keeper, self._mine = keepers[group.rank()][0], self.wards[group.rank()]

    def exchange(self, kept: KeptState, number: int) -> None:
        """Return when this rank has its wards' copies of commit `number`, and its own has left. All ranks call it.

        Raises:
            PhalanxError: a peer is gone; or a copy was changed on its way.
        """
        with own_clock(self._group, (1 + len(self._mine)) * kept.slot_bytes):
            sent = self._send(kept, number)
            for ward in self._mine:
                self._receive(kept, ward, number)
            for work in sent:
                work.wait()

    def _send(self, kept: KeptState, number: int) -> list[Any]:
        content = kept.content(number)
        pickled = _HEAD.pack(-1, 0) if content is None else _HEAD.pack(number, content.tensors.nbytes)
        pickled += b"" if content is None else content.structure
        me = self._group.rank()
        signed = self._authenticator.send(pickled, PickleStream(_STREAM, me, self._keeper))
        parts = [torch.tensor([len(signed)]), torch.frombuffer(bytearray(signed), dtype=torch.uint8)]
        if content is not None and content.tensors.nbytes:
            parts.append(content.tensors)
        return [dist.isend(part, group=self._group, group_dst=self._keeper, tag=_TAG) for part in parts]

    def _receive(self, kept: KeptState, ward: int, number: int) -> None:
        nbytes = int(self._take(ward, torch.empty(1, dtype=torch.int64)))
        if not 0 < nbytes <= kept.slot_bytes:
            raise PhalanxError(
                f"phalanx.elastic: rank {ward} announces {nbytes} bytes of what it keeps of commit {number}, where "
                f"there is room for {kept.slot_bytes}. The announcement was changed on its way between the hosts."
            )
        message: Any = self._take(ward, torch.empty(nbytes, dtype=torch.uint8)).numpy()
        signed = memoryview(message)
        pickled = self._authenticator.receive(signed, PickleStream(_STREAM, ward, self._group.rank()))
        found, size = _HEAD.unpack_from(pickled)
        if found < 0:
            return  # the slot has an older number, or none: a loss of the ward finds nothing of this commit
        structure = bytes(pickled[_HEAD.size :])
        memory = kept.begin_copy(ward, number, structure, size)
        if size:
            self._take(ward, memory)
        kept.end_copy(ward, number, structure)

    def _take(self, ward: int, memory: Tensor) -> Tensor:
        dist.recv(memory, group=self._group, group_src=ward, tag=_TAG)
        return memory
