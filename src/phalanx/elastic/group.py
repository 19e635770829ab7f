"""`ElasticGroup` records each rank's state at each step, and is formed again after a loss.

Each rank keeps a record of the state that it alone has (random states, its own buffers) in memory that outlives the
rank. The ranks of a new generation form their group, agree on the step to resume from, and transfer the state that some
of them lack.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from phalanx._base.log import get_logger
from phalanx._comm.backend import rendezvous
from phalanx._comm.backend.create import open_transport
from phalanx._comm.backend.torch_integration import groups
from phalanx._comm.backend.torch_integration.groups import list_groups, phalanx_group
from phalanx._comm.diagnostics.progress_page import open_page
from phalanx._comm.rendezvous.bootstrap import checked_while_forming
from phalanx._comm.transport.rehearsal import RefusingTransport
from phalanx.elastic.commits import Commits
from phalanx.elastic.frozen import Frozen
from phalanx.elastic.generations import GenerationNotice, Generations, JobEndedError, SupersededError
from phalanx.elastic.generator_states import GeneratorStates
from phalanx.elastic.groups import form_world, leave_all_groups, next_rendezvous
from phalanx.elastic.losses import NewGenerationError, is_loss
from phalanx.elastic.points import AGREE, FINISH, FORM, LEAVE, REBIND, RESTORE, TRANSFER, reached
from phalanx.elastic.rebind import rebind_module
from phalanx.elastic.records import RankRecords, restore_random, small_of
from phalanx.elastic.state_transfer import ShardedPart, transfer_state
from phalanx.elastic.step import TRIAL_STEPS

_logger = get_logger(__name__)

if TYPE_CHECKING:
    from phalanx._comm.backend.process_group import PhalanxProcessGroup


class ElasticGroup:
    """`ElasticGroup` is this rank's membership in the job's default group, and the `Runner` of its commits."""

    def __init__(self, commits: Commits, group: Any, membership: Generations, name: str = "") -> None:
        self._set_group(group)
        self.generation = rendezvous.generation()
        self.is_complete = True  # False until a state that this rank receives has arrived completely
        self._commits, self._membership, self._name = commits, membership, name
        self._random = GeneratorStates()
        self._records: RankRecords | None = None
        self._records_generation = -1
        self._prepared_seq = (-1, -1)
        self._script_groups = ScriptGroups(group)
        self.ranks_differ = False
        """Whether the ranks' small states differ, or random states or buffers change after a backward.

        If so, the ranks wait for each other in each commit.
        """
        self._page = open_page(rendezvous.agent_address())
        self._page.set_generation(self.generation)

    def _set_group(self, group: Any) -> None:
        self.process_group, ours = group, phalanx_group(group)
        assert ours is not None  # elastic.run forms no other groups
        self._ours: PhalanxProcessGroup = ours

    def start(self) -> None:
        """Begin the run in its first group, in which all ranks hold the same state. All ranks call this."""
        self._commits.begin_run()
        self._records = self._new_records(self._layers())
        self._records_generation = self.generation
        self._records.prepare(0)
        self._records.write_small(0, self._commits.latest.small)
        for optimizer in self._commits.objects.sharded:
            optimizer.back_up_state()
        self.ranks_differ = self._records.gather_answers(0).differ and not self._commits.objects.rounds

    def _new_records(self, layers: dict[str, Any], room: tuple[int, int] = (0, 0)) -> RankRecords:
        """Return new records, for a group that was just formed or for more room. All ranks call this."""
        apart = bool(self._commits.objects.rounds)
        return RankRecords(self.process_group, layers, self._random, room, apart=apart)

    def _layers(self) -> dict[str, Any]:
        """Return the layers of the trained models, whose buffers may differ between ranks."""
        objects = self._commits.objects
        trained = {id(layer) for module in objects.trained for layer in module.modules()}
        return {key: layer for key, layer in objects.named_layers().items() if id(layer) in trained}

    # -- while it trains ------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Write the state that only this rank has to memory that outlives the rank."""
        assert self._records is not None
        self._records.prepare(self._commits.latest.number + 1)
        self._prepared_seq = self.count_collectives()

    @property
    def timeout_s(self) -> float:
        """Return the timeout of the group's operations."""
        return self._ours.timeout_s

    def count_collectives(self) -> tuple[int, int]:
        """Return the number of the default group's collectives, and the number of its gradient rounds."""
        ours = self._ours
        return ours._get_sequence_number_for_group(), ours.num_gradient_rounds

    def require_group(self) -> None:
        """Wait in a barrier, which raises at once if the group has ended."""
        dist.barrier(group=self.process_group)

    def before_commit(self, number: int, small: Frozen, counted: tuple[int, int]) -> bool:
        """Write the record of this commit, and return whether the ranks wait for each other in commits like this one.

        They wait in the run's first commits, regardless of the result, and in a commit without a collective since the
        step's backward began. After the first commits, the previous commit decides: the ranks wait again if their small
        states differed, or if a rank drew random numbers or changed buffers after a backward, or needed more room. A
        rank that has contributed gradients to this step has completed the previous commit, so all ranks decide alike.
        """
        records = self._records
        assert records is not None
        is_unseen = not records.has_begun(number) or self._prepared_seq == counted
        if not records.is_prepared(number):
            records.is_late |= records.has_begun(number)
            records.prepare(number)
        elif number <= TRIAL_STEPS and not records.is_copied(number):  # a later backward drew, or changed buffers
            records.is_late = True
        records.write_small(number, small)
        if self.process_group.size() == 1 or self._commits.objects.rounds:
            # a rank that trains apart resumes from its own step after a loss, and others may be in a round
            return False
        if is_unseen or number <= TRIAL_STEPS or self.ranks_differ or not records.may_skip_wait(number):
            answers = records.gather_answers(number)
            self.ranks_differ |= answers.differ or answers.are_late
            if any(answers.room):
                self._grow_records(number, small, answers.room)
        return self.ranks_differ or is_unseen

    def _grow_records(self, number: int, small: Frozen, room: tuple[int, int]) -> None:
        """Switch to larger records that contain this commit. All ranks call this."""
        assert self._records is not None
        fresh = self._new_records(self._layers(), room)
        fresh.is_late = self._records.is_late
        fresh.prepare(number)
        fresh.write_small(number, small)
        dist.barrier(group=self.process_group)
        self._records = fresh

    def after_commit(self) -> None:
        """Raise if ranks wait to join, or the launcher has announced another change: ranks stop for it only here."""
        if self._membership.newer_than(self.generation):
            raise NewGenerationError("phalanx.elastic: other ranks are waiting to join the job")

    def finish(self) -> None:
        """Wait until all ranks have finished: a rank that is lost after others have exited could not be replaced."""
        reached(FINISH)
        if self.process_group.size() > 1:
            dist.barrier(group=self.process_group)
        self._membership.finished()

    def find_loss(self, error: BaseException) -> BaseException | None:
        """Return the loss of a peer that caused `error`, or None; torch's reducer turns a loss into a RuntimeError."""
        if is_loss(error):
            return error
        if type(error) is not RuntimeError:
            return None
        groups = filter(None, map(phalanx_group, list_groups()))
        failures = (group.find_failure() for group in groups)
        return next((failure for failure in failures if failure is not None and is_loss(failure)), None)

    def restore_own(self) -> None:
        """Restore this rank's random states and buffers to the latest commit."""
        record = None if self._records is None else self._records.read(self._records.rank, self._commits.latest.number)
        if self._records is not None and record is not None:
            self._records.restore(record)

    # -- in a new generation --------------------------------------------------------------------------------------

    def enter(self, generation: GenerationNotice) -> None:
        """Leave the group, join `generation`, and restore the state to resume from. All of its ranks call this.

        Raises:
            SupersededError: a later generation has started meanwhile.
            ValueError: the ranks' functions or States differ.
            JobEndedError: no rank holds the whole state, or a part of it cannot be restored.
        """
        old = self.process_group
        self._resume(old, self._form_group(generation))

    def _check(self) -> None:
        if self._membership.newer_than(self.generation):
            raise SupersededError

    def _form_group(self, generation: GenerationNotice) -> list[RankState]:
        """Leave the group, form the group of `generation`, and return the states that its ranks report."""
        reached(LEAVE)
        timeout = timedelta(seconds=self.timeout_s)
        leave_all_groups()
        self.generation = generation.number
        self._page.set_generation(generation.number)
        self._store, rank, world_size = next_rendezvous(generation.environment)
        reached(FORM)
        self._set_group(form_world(self._store, rank, world_size, timeout, self._check))
        reached(AGREE)
        rank_states = self._gather_rank_states()
        if problem := describe_differing(rank_states):
            raise ValueError(
                f"phalanx.elastic, generation {generation.number}: the ranks pass different objects to elastic.State: "
                f"{problem}.\nStart every host with the same script and the same strategy."
            )
        return rank_states

    def _resume(self, old: Any, rank_states: list[RankState]) -> None:
        """Restore the state from which the ranks resume. All ranks call this."""
        rank = self.process_group.rank()
        with checked_while_forming(self._check):
            self._script_groups.form(self.process_group, [one.groups for one in rank_states])
        agreement = decide_resume_point(rank_states, apart=bool(self._commits.objects.rounds))
        if agreement is None:
            raise JobEndedError(
                f"phalanx.elastic, generation {self.generation}: no remaining rank has the whole state.\n"
                "Start again from the last checkpoint."
            )
        kept = [one.read_state_backup() for one in self._commits.objects.sharded] if rank == agreement.source else None
        self._rebind(old, agreement)
        self._transfer_state(agreement, rank_states, kept)

    def _gather_rank_states(self) -> list[RankState]:
        commits = self._commits
        commits.tracker.undo_update(commits.num_steps)
        mine = RankState(
            number=commits.latest.number,
            is_whole=self.is_complete and commits.tracker.is_whole,
            has_stepped=self.is_complete and commits.tracker.stepped != 1,
            progress=commits.tracker.progress,
            was_rank=-1 if self._records is None else self._records.rank,
            records_of=self._records_generation,
            reads=() if self._records is None else self._records.readable,
            groups=self._script_groups.name_all(self.process_group.rank(), self.process_group.size()),
            differs=self.ranks_differ or (self._records is not None and self._records.is_late),
            form=f"{self._name}({commits.form})",
        )
        rank_states: list[Any] = [None] * self.process_group.size()
        dist.all_gather_object(rank_states, mine, group=self.process_group)
        self.ranks_differ = any(one.differs for one in rank_states)
        return rank_states

    def _rebind(self, old: Any, agreement: ResumePoint) -> None:
        reached(REBIND)
        for module in self._commits.objects.modules:
            rebind_module(module, old, self.process_group)
        for rounds in self._commits.objects.rounds:
            rounds.regroup(self.process_group)
        for optimizer in self._commits.objects.sharded:
            number = [optimizer.num_updates]
            dist.broadcast_object_list(number, group=self.process_group, group_src=agreement.source)
            optimizer.regroup(self.process_group, agreement.source, number[0])

    def _transfer_state(self, agreement: ResumePoint, rank_states: list[RankState], kept: list[Any] | None) -> None:
        commits, rank = self._commits, self.process_group.rank()
        receives = rank in agreement.receivers
        if commits.objects.rounds and not receives and commits.tracker.stepped:
            commits.count_as_done(commits.latest.number + 1)
        number = commits.latest.number if commits.objects.rounds else agreement.number
        mine, is_own, is_lost = self._find_record(number, rank_states)
        if agreement.is_ahead and not receives:
            commits.count_as_done(agreement.number)
        if agreement.receivers:
            reached(TRANSFER)
            if receives:
                self.is_complete = False
            transfer_state(commits.parts(), agreement.source, agreement.receivers, self.process_group)
        self._transfer_shards(agreement, kept)
        for rounds in commits.objects.rounds:
            rounds.catch_up(is_new=receives)
        reached(RESTORE)
        if receives and not commits.objects.rounds:
            self._restore_own_small(mine if is_own else None, agreement, is_lost=is_lost)
        commits.restore(rank, self.process_group.size())
        fresh = self._new_records(self._layers())
        if mine is not None:
            fresh.restore(mine, random=is_own)
        fresh.prepare(commits.latest.number)
        fresh.write_small(commits.latest.number, commits.latest.small)
        # From here on a lost rank can be restored from its new record, and until here from its old one.
        dist.barrier(group=self.process_group)
        self._records, self._records_generation = fresh, self.generation
        self.is_complete = True
        self._prepared_seq = (-1, -1)
        record = fresh.read(rank, commits.latest.number)
        assert record is not None
        commits.resume_with(functools.partial(restore_random, record))

    def _restore_own_small(self, mine: Tensor | None, agreement: ResumePoint, *, is_lost: bool) -> None:
        """Restore this rank's own small state, which may differ from the source's."""
        number = agreement.number
        small = None if self._records is None else self._records.own_small(number)
        if small is None and mine is not None:
            small = small_of(mine, number)
        if small is not None:
            self._commits.latest.small = small
        elif is_lost:
            _logger.warning(
                "phalanx.elastic: the record of rank %d at commit %d is lost (with its host, or because its buffers "
                "grew too fast). It continues with the buffers and values of rank %d, and with other random numbers.",
                self.process_group.rank(),
                number,
                agreement.source,
            )
        elif mine is not None and self.ranks_differ:
            _logger.warning(
                "phalanx.elastic: rank %d was lost before it reached commit %d, in which ranks began to differ (in "
                "values of State, extra states, averages, or random draws after a backward). Its own values are lost; "
                "it continues with the values of rank %d.",
                self.process_group.rank(),
                number,
                agreement.source,
            )

    def _transfer_shards(self, agreement: ResumePoint, kept: list[Any] | None) -> None:
        """Load each rank's new shard of every sharded optimizer's state: the old shards ended with the old group."""
        others = [rank for rank in range(self.process_group.size()) if rank != agreement.source]
        for number, optimizer in enumerate(self._commits.objects.sharded):
            part = ShardedPart(optimizer, None if kept is None else kept[number])
            if others:
                transfer_state([part], agreement.source, others, self.process_group)
            if kept is not None:
                part.load_contents(part.get_contents())
            optimizer.back_up_state()

    def _find_record(self, step: int, rank_states: list[RankState]) -> tuple[Tensor | None, bool, bool]:
        """Return the record of this rank, or of the rank that it replaces, for the step to resume from. Collective.

        The second value is False if the record is that of yet another rank, for its buffers: an additional rank gets
        one, and so does the replacement of a rank whose memory is lost. The third tells whether a record was lost.
        """
        size = self.process_group.size()
        newest = max(one.records_of for one in rank_states)
        holders = [rank for rank, one in enumerate(rank_states) if one.records_of == newest]
        if newest < 0:
            return None, False, False
        me = rank_states[self.process_group.rank()]
        mine: tuple[Tensor | None, bool, bool] = None, False, False
        if self._records is not None and me.records_of == newest:
            mine = self._records.read(self._records.rank, step), True, False
        alive = {one.was_rank for one in rank_states if one.records_of == newest}
        # A rank without records gets the slot of the old rank with its number, from a rank that can read that slot.
        for newcomer in (r for r in range(size) if r not in holders):
            reader = next((rank for rank in holders if newcomer in rank_states[rank].reads), holders[0])
            answer: list[Any] = [None]
            if self._records is not None and self.process_group.rank() == reader:
                is_lost = newcomer < self._records.size and newcomer not in alive
                left = self._records.read(newcomer, step) if is_lost else None
                own = self._records.read(self._records.rank, step)
                answer = [(own, False, is_lost) if left is None else (left, True, False)]
            dist.broadcast_object_list(answer, group=self.process_group, group_src=reader)
            if newcomer == self.process_group.rank():
                mine = answer[0]
        return mine


# Form again, after a loss, the groups that a script created before `elastic.run` (with `new_group` or a DeviceMesh).
#
# They stay the same Python objects, under the names by which a mesh finds them. A group is formed again from the same
# rank numbers if all of these ranks list it; a group of all ranks gets all current ranks. The next operation of any
# other group raises an error with the group's name.

Named = tuple[str, tuple[int, ...]]


def plan_groups(own: Sequence[Named], named: Sequence[Sequence[Named]]) -> list[bool]:
    """Return, for each of a rank's groups, whether all its members list it in `named`; only then is it formed again."""
    return [all(group in named[member] for member in group[1]) for group in own]


class ScriptGroups:
    """`ScriptGroups` keeps the groups of this process other than `world`, in the order of their creation."""

    def __init__(self, world: Any) -> None:
        self._rank, self._size = world.rank(), world.size()
        self._count = groups.count_groups()
        self._kept: list[groups.Registration] = []
        foreign = []
        for known in groups.list_registrations():
            if known.group is world:
                continue
            if groups.phalanx_group(known.group) is None:
                foreign.append(f"{known.name!r} ({known.backend}, ranks {list(known.ranks)})")
            else:
                self._kept.append(known)
        if foreign:
            _logger.warning(
                "phalanx.elastic: after a loss these groups cannot be used, as their backend is not 'phalanx': %s. "
                "Create them in the function that elastic.run calls.",
                ", ".join(foreign),
            )

    def name_all(self, rank: int, size: int) -> tuple[Named, ...]:
        """Return the names and members of the groups that `rank`, one of `size` ranks, can form again."""
        stays = (rank, size) == (self._rank, self._size)
        named = ((kept, self._members(kept, size)) for kept in self._kept)
        return tuple((kept.name, ranks) for kept, ranks in named if stays or self._is_of_all(kept))

    def _is_of_all(self, kept: groups.Registration) -> bool:
        return kept.ranks == tuple(range(self._size))

    def _members(self, kept: groups.Registration, size: int) -> tuple[int, ...]:
        return tuple(range(size)) if self._is_of_all(kept) else kept.ranks

    def form(self, world: Any, named: Sequence[Sequence[Named]]) -> None:
        """Form each group again from its members; `named` has the groups that each rank lists. All ranks call this."""
        rank, size = world.rank(), world.size()
        own = self.name_all(rank, size)
        formed = {group[0] for group, forms in zip(own, plan_groups(own, named), strict=True) if forms}
        default_store = groups.store_of(world)
        for kept in self._kept:
            ranks = self._members(kept, size)
            store = PrefixStore(f"{kept.name}/", default_store)
            number = ranks.index(rank) if rank in ranks else 0
            refuse = functools.partial(_refused, kept.name, number, kept.ranks, self._size, size)
            ours = groups.phalanx_group(kept.group)
            assert ours is not None  # no other groups are kept
            if kept.name in formed:
                options = SimpleNamespace(
                    store=store, group_rank=number, group_size=len(ranks),
                    timeout=timedelta(seconds=ours.timeout_s), group_id=kept.name,
                    global_ranks_in_group=list(ranks),
                )  # fmt: skip
                opened = functools.partial(open_transport, options, ours.backend_options)
                ours.reconnect(opened, refuse(), store, number, len(ranks), ranks)
            else:
                ranks = (rank,)  # torch looks up this process's rank in the group for the message
                ours.reconnect(refuse, refuse(), store, 0, 1, ranks)
            groups.register_again(kept, store, ranks)
        groups.count_groups_from(self._count)


def _refused(group: str, rank: int, ranks: Sequence[int], old_size: int, size: int) -> RefusingTransport:
    """Return the transport of a group that cannot be formed again."""

    def explain(where: str) -> str:
        return (
            f"group {group!r} of ranks {list(ranks)} was created before elastic.run, for a job of {old_size} ranks, "
            f"but is used{where} after a loss. The job now has {size} ranks, numbered differently.\n"
            "Create the group in the function that elastic.run calls: torch.distributed.new_group(...)."
        )

    return RefusingTransport(group, rank, len(ranks), explain)


# Decide from which step a new generation resumes, and which rank sends its state to which others; pure functions.


@dataclass(frozen=True)
class RankState:
    """A `RankState` is a rank's report on its state when a generation forms its group.

    `number` is that of the rank's latest commit, -1 if it has just started. `is_whole`: parameters and optimizers are
    as they were at that commit; otherwise the rank was between an update and its commit, or in the middle of a
    transfer. `has_stepped`, if not whole: the next step's update is complete, and only its commit is missing.
    `was_rank` is its rank in the generation whose records it has, -1 for none.
    """

    number: int
    is_whole: bool
    has_stepped: bool
    was_rank: int
    records_of: int = -1
    """The generation whose records this rank can read; -1 for none."""
    reads: tuple[int, ...] = ()
    """The ranks of that generation whose records this rank can read: those of its host, and its primaries."""
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The groups, by name and members, that the rank's script created before `elastic.run` and can form again."""
    differs: bool = False
    """Whether the ranks' small states differ, so that each rank must restore its own."""
    form: str = ""
    """The function that the rank runs, and the names and kinds of its State's objects; the same on all ranks."""
    progress: tuple[int, bool] = (0, False)
    """How many updates the rank has made since that commit, and whether the next commit had begun."""


@dataclass(frozen=True)
class ResumePoint:
    """A `ResumePoint` is the step to resume from.

    `source` sends its state of that step to `receivers`; the other ranks have it already. If `is_ahead`, no rank has
    committed the step, but ranks have made its update: the step counts as done, up to where `source` was interrupted.
    """

    number: int
    source: int
    receivers: tuple[int, ...]
    is_ahead: bool = False


def describe_differing(rank_states: Sequence[RankState]) -> str:
    """Describe the first rank whose function or State differs from rank 0's; return "" if there is none."""
    first = rank_states[0].form
    for rank, one in enumerate(rank_states):
        if one.form != first:
            return f"rank {rank} has {one.form}, rank 0 has {first}"
    return ""


def decide_resume_point(rank_states: Sequence[RankState], *, apart: bool = False) -> ResumePoint | None:
    """Return the point from which the ranks resume; None if no rank holds a whole state.

    `apart`: the ranks train apart (LocalSGD, DiLoCo), so each resumes from its own step, and only new ranks receive.

    The point is the latest commit that a rank can still restore; if there is none, it is the step whose update is
    complete but not committed. Ranks differ by one step at most, because a rank that updates has received the gradients
    of all ranks. In a step that no rank has committed, ranks may differ in what they have done since the first update
    (further updates, a scheduler's step, values): all resume from the rank that has got farthest.
    """
    if apart:
        old = [rank for rank, one in enumerate(rank_states) if one.number >= 0 and (one.is_whole or one.has_stepped)]
        new = tuple(rank for rank in range(len(rank_states)) if rank not in old)
        return ResumePoint(rank_states[old[0]].number, old[0], new) if old else None
    whole = [rank for rank, one in enumerate(rank_states) if one.is_whole and one.number >= 0]
    if whole:
        number = max(rank_states[rank].number for rank in whole)
        holders = [rank for rank in whole if rank_states[rank].number == number]
        return ResumePoint(number, holders[0], tuple(r for r in range(len(rank_states)) if r not in holders))
    ahead = [rank for rank, one in enumerate(rank_states) if one.has_stepped and one.number >= 0]
    if not ahead:
        return None
    number = max(rank_states[rank].number for rank in ahead) + 1
    holders = [rank for rank in ahead if rank_states[rank].number == number - 1]
    most = max(rank_states[rank].progress for rank in holders)
    holders = [rank for rank in holders if rank_states[rank].progress == most]
    _, is_committing = most
    if not is_committing:  # ranks may have done more than the update, and not the same
        holders = holders[:1]
    return ResumePoint(number, holders[0], tuple(r for r in range(len(rank_states)) if r not in holders), is_ahead=True)
