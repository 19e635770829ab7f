"""Keep each rank's part of a Pipeline where it outlives the rank, in an elastic job.

    pipe.step, optimizer.step, commit k     on every rank
    slot k%2: all that this rank has        number -1; parameters, buffers, optimizer, values; number k
    a copy of the slot                      to a rank of the next host, where there are several (`keep="neighbour"`)
    what differs from replica to replica    the random states and the values: to a rank each of the next two hosts
    barrier                                 a rank that passes it knows that all have written slot k

When a rank is lost, all go back to the last commit whose barrier some rank has passed: each to its own slot, and a new
rank to the slot of its number, or, if that is lost, to that of a replica, a rank with the same stage. No slot of that
commit has been written over: the next but one comes after the next barrier.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.log import get_logger
from phalanx._base.partition.owners import owner_of
from phalanx._comm.backend.pickles import pickle_authenticator
from phalanx._comm.backend.shared import shares_memory
from phalanx._comm.transport.authentication import PickleStream
from phalanx.elastic.carry import own_clock
from phalanx.elastic.generations import JobEndedError
from phalanx.elastic.hand_over import Part, hand_over
from phalanx.elastic.record_copies import hosts_of, plan_keepers, plan_wards
from phalanx.elastic.records import RankRecords, small_of
from phalanx.elastic.resume_point import RankState
from phalanx.elastic.state import State
from phalanx.errors import PhalanxError
from phalanx.optim.kept_state import KeptState

_logger = get_logger(__name__)
_LOAD = "Start again, with a new Pipeline and the last checkpoint (phalanx.CheckpointManager)."


class OwnPart:
    """`OwnPart` hands all parts of one rank over as one; a rank that gives them for another one has `value`."""

    def __init__(self, parts: Sequence[Part], value: Any = None) -> None:
        self._parts = parts
        self._value = value

    def show(self) -> Any:
        """Return `value` if there is one, else what the parts hold."""
        return [part.show() for part in self._parts] if self._value is None else self._value

    def take(self, value: Any) -> None:
        for part, one in zip(self._parts, value, strict=True):
            part.take(one)


class StageRecords:
    """`StageRecords` keeps this rank's two slots, and reads those of all ranks of its host. Building it is collective.

    Cost: twice the parameters, buffers and optimizer state of a stage, in shared memory; a copy of them at each commit.
    On several hosts the memory is each rank's own, and a replica's is as good. With `keep="neighbour"` it is twice that
    memory there, for the copies of another host's rank, and one message with all of it at each commit.
    """

    def __init__(self, state: State, group: Any, keep: str | None) -> None:
        self._state, self._group = state, group
        tensors = [t for m in state._objects.modules for t in (*m.parameters(), *m.buffers())]
        sizes: list[Any] = [None] * group.size()
        dist.all_gather_object(sizes, (sum(t.numel() for t in tensors), len(tensors)), group=group)
        self._copies = None if shares_memory(group) or keep is None else StageCopies(group, hosts_of(group))
        wards = None if self._copies is None else self._copies.wards
        self._kept = KeptState(group, max(n for n, _ in sizes), max(n for _, n in sizes), wards)
        self._num_steps = -1
        self.number = -1
        """The number of the last commit that all ranks have written."""

    def keep(self, records: RankRecords) -> None:
        """Write this commit, as all ranks do. All ranks call it."""
        number, num_steps = self._state._latest.number, sum(pipe.num_steps for pipe in self._state._objects.pipelines)
        if num_steps == self._num_steps:  # the ranks have not waited for each other since the last one
            dist.barrier(group=self._group)
        self._num_steps = num_steps
        records.prepare(number)
        records.write_small(number, self._state._latest.small)
        self._kept.save(number, OwnPart(self._state._own_parts()).show())
        if self._copies is not None:
            self._copies.exchange(self._kept, number)
        dist.barrier(group=self._group)
        self.number = number

    @staticmethod
    def find_givers(mine: StageRecords | None, state: State, number: int, group: Any) -> dict[int, tuple[int, int]]:
        """Return, by rank, which rank has what it goes on with, and which rank kept that at commit `number`: this one
        itself, or a replica. All ranks call it.

        `mine` is this rank's, if it was there.

        Raises:
            JobEndedError: on all ranks, if something is missing; the message says whose, and what to do.
        """
        size = group.size()
        held = [] if mine is None else [rank for rank in range(size) if mine._kept.holds(rank, number)]
        told: list[Any] = [None] * size
        dist.all_gather_object(told, held, group=group)
        givers = {rank: (giver, rank) for giver in reversed(range(size)) for rank in told[giver]}
        givers |= {rank: (rank, rank) for rank in range(size) if rank in told[rank]}
        for rank in [rank for rank in range(size) if rank not in givers]:
            replicas = [one for one in range(size) if one in told[one] and are_replicas(state, one, rank)]
            if replicas:
                givers[rank] = replicas[0], replicas[0]
        if missing := [rank for rank in range(size) if rank not in givers]:
            raise JobEndedError(
                f"nothing is left of what {name_stages(state, missing)} kept of commit {number}: whoever had it was "
                f"lost as well, or it is larger than there is room for. Where all replicas of a stage are on one host, "
                f"elastic.run(state, keep='neighbour') keeps it on another one.\n{_LOAD}"
            )
        return givers

    @staticmethod
    def hand_over(
        mine: StageRecords | None,
        state: State,
        number: int,
        givers: Mapping[int, tuple[int, int]],
        record: Tensor | None,
        group: Any,
    ) -> None:
        """Restore each rank to what the rank of its number kept of that commit, or a replica. All ranks call it.

        `record` is what is left of this rank for itself: its values are in it, which a replica has not.
        """
        me, parts = group.rank(), state._own_parts()
        for rank, (giver, owner) in sorted(givers.items()):
            if rank != giver:
                theirs = mine._kept.read_of(owner, number) if mine is not None and me == giver else None
                hand_over([OwnPart(parts, theirs)], giver, [rank], group)
        giver, owner = givers[me]
        if giver == me:
            assert mine is not None
            OwnPart(parts).take(mine._kept.read_of(me, number))
        elif owner != me:
            small = None if record is None else small_of(record, number)
            if small is not None:
                state._latest.small = small
            else:
                _logger.warning(
                    "phalanx.elastic: rank %d has its stage from rank %d, a replica, and the values of State too, from "
                    "there: its own of commit %d are lost with the hosts that had them, or larger than is kept.",
                    me, owner, number,
                )  # fmt: skip


def has_replicas(state: State) -> bool:
    """Return whether other ranks hold all that a rank has of a Pipeline, but for its random states and values."""
    groups = [pipe.data_group for pipe in state._objects.pipelines]
    return not state._objects.sharded and all(group is not None and group.size() > 1 for group in groups)


def are_replicas(state: State, one: int, other: int) -> bool:
    """Return whether two ranks have the same stages, with the same state."""
    pipes = state._objects.pipelines
    return has_replicas(state) and all(pipe.pipeline_rank(one) == pipe.pipeline_rank(other) for pipe in pipes)


def why_not_kept(state: State, group: Any, keep: str | None) -> str:
    """Return why a stage that is lost cannot be restored; empty if it can. `keep` is that of `elastic.run`."""
    if state._objects.rounds:
        return "a Pipeline with LocalSGD or DiLoCo is not kept"
    if not all(pipe.spans(group) for pipe in state._objects.pipelines):
        return "a Pipeline on some of the ranks only is not kept"
    data_groups = [pipe.data_group for pipe in state._objects.pipelines]
    if any(all(one.process_group is not group for group in data_groups) for one in state._objects.sharded):
        return "an optimizer that is shared with other ranks than the replicas of its stage is not kept"
    if shares_memory(group):
        return ""
    if not hosts_of(group):
        return "its ranks share no memory, so the stage's weights went with it"
    if keep is None and not has_replicas(state):
        return (
            "its ranks are on several hosts, where a stage without a replica (or with an optimizer in shards) is only "
            "kept with elastic.run(state, keep='neighbour')"
        )
    return ""


def rebind_sharded(state: State) -> None:
    """Let optimizers that replicas share use their new groups; states come later. All ranks call it."""
    for optimizer in state._objects.sharded:
        owner = owner_of(optimizer)
        group = next(pipe.data_group for pipe in state._objects.pipelines if pipe is owner)
        number = [optimizer.num_updates]
        dist.broadcast_object_list(number, group=group, group_src=0)
        assert group is not None
        optimizer.regroup(group, 0, number[0])


def require_same_stages(state: State, why: str, size: int, standings: Sequence[RankState], group: Any) -> None:
    """Raise, on all ranks, if the stages cannot go on in this group. All ranks call it.

    `why` says why they are not kept, and `size` how many ranks they had, as survivors know.

    Raises:
        JobEndedError: which stage was lost, why it can't be had back, and what to do.
    """
    pipes = state._objects.pipelines
    newest = max(one.records_of for one in standings)
    survivors = {one.was_rank for one in standings if one.was_rank >= 0}
    me = standings[group.rank()]
    mine = (me.was_rank >= 0, why, size, [pipe.counts for pipe in pipes])
    heard: list[Any] = [None] * group.size()
    dist.all_gather_object(heard, mine, group=group)
    known = next((one for one in heard if one[0]), None)
    if known is None or newest < 0:
        raise JobEndedError(f"no rank is left that has what the pipeline's stages were.\n{_LOAD}")
    _, why, size, counts = known
    lost = name_stages(state, [rank for rank in range(size) if rank not in survivors])
    if why:
        raise JobEndedError(f"{lost} was lost, and {why}.\n{_LOAD}")
    if group.size() != size:
        raise JobEndedError(
            f"{lost} was lost and not replaced: the pipeline's {size} ranks can't go on as {group.size()}.\n{_LOAD}"
        )
    if any(one.was_rank not in (-1, rank) for rank, one in enumerate(standings)):
        raise JobEndedError(f"{lost} was lost, and the ranks that are left have other numbers now.\n{_LOAD}")
    for rank, one in enumerate(heard):
        if one[3] != counts:
            raise JobEndedError(
                f"{lost} was lost, and its replacement has cut the model into {[list(c) for c in one[3]]} layers per "
                f"stage, the others into {[list(c) for c in counts]}: what is measured differs from run to run (rank "
                f"{rank}). Give balance= the numbers that print(pipe.plan) shows.\n{_LOAD}"
            )


def name_stages(state: State, ranks: Sequence[int]) -> str:
    """Return the stages of some ranks in words."""
    pipe = state._objects.pipelines[0]
    named = [f"stage {', '.join(map(str, pipe.stages_of(pipe.pipeline_rank(rank))))} (rank {rank})" for rank in ranks]
    return " and ".join(named) or "no stage"


# Copy what each rank of a Pipeline has kept of a commit to a rank of the next host, so that a whole host may be lost.
#
#     rank b, host B    keeps commit k in its slot    ── structure (with a MAC), tensors ──▶    rank c, host C
#     all ranks         barrier: a rank that passes it knows that every slot of commit k is written, and every copy
#
# The last host copies to the first one. A stage is lost with its copy if both of these hosts are lost at once.

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
