"""`run`: call a function until it has ended on every rank, whoever is lost on the way."""

from __future__ import annotations

import fcntl
import functools
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch import Tensor

from phalanx.backend import rendezvous
from phalanx.backend.process_group import PhalanxProcessGroup
from phalanx.backend.shared import rehearses
from phalanx.checkpoint import load_checkpoint, save_checkpoint
from phalanx.coordination.bootstrap import checked_while_meeting
from phalanx.diagnostics.progress_page import open_page
from phalanx.elastic.agreement import Agreement, Standing, decide, describe_differing
from phalanx.elastic.channel import AgentChannel
from phalanx.elastic.except_hook import one_except_hook
from phalanx.elastic.hand_over import ShardedPart, hand_over
from phalanx.elastic.membership import Generation, JobEndedError, Loss, Membership, SupersededError
from phalanx.elastic.points import AGREE, FINISH, HAND_OVER, LEAVE, LOST, MEET, REBIND, RESTORE, reached
from phalanx.elastic.random_state import RandomStates
from phalanx.elastic.rebind import rebind_module
from phalanx.elastic.records import RankRecords
from phalanx.elastic.stages import StageRecords, rebind_sharded, require_same_stages, why_not_kept
from phalanx.elastic.state import State
from phalanx.errors import DeadlineError, PeerLostError, PhalanxError
from phalanx.log import get_logger

_logger = get_logger(__name__)
_Result = TypeVar("_Result")
_has_returned = False  # an elastic function of this process
Train = Callable[[State], _Result]


class _NewGeneration(PhalanxError):
    """Others wait to be let in: all ranks stop at a commit, and form the group anew."""


def run(
    state: State,
    *,
    min_ranks: int = 1,
    wait_s: float = 60.0,
    checkpoint: str | os.PathLike[str] | None = None,
    membership: Membership | None = None,
) -> Callable[[Train[_Result]], Callable[..., _Result]]:
    """Let a function that trains `state` go on when ranks are lost, or come.

        @phalanx.elastic.run(state)
        def train(state):
            for epoch in state.epochs(10):
                for batch in loader:
                    ...
                    optimizer.step()
                    state.commit()

        train(state)

    `train(state)` returns what the function returns, once it has returned on all ranks. Where a rank is lost, the
    others hear it as an error of the operation at hand; it ends the function, the group is formed again, all ranks go
    back to the latest step that one of them completed, and the function is called again. Nothing else is: not the
    script, and not what the function does not make itself. Without `phalanx run` it is called once.

    Arguments:
        min_ranks: with fewer the job waits, with what it knows in memory.
        wait_s: for how long; then it ends.
        checkpoint: the file into which `state.state_dict()` is saved before it ends so.
        membership: who decides who is in the job; by default the agent of `phalanx run`.

    Raises:
        Whatever the function raises that is not the loss of a peer.
        PhalanxError: nobody is left who holds the state.
        SystemExit: fewer than `min_ranks` for longer than `wait_s`; the exit code is 75.
    """

    def decorate(train: Train[_Result]) -> Callable[..., _Result]:
        @functools.wraps(train)
        def start(*given: Any) -> _Result:
            if given not in ((), (state,)):
                raise TypeError(f"{train.__name__}: it trains the state that phalanx.elastic.run was given, no other")
            return ElasticJob(state, membership, min_ranks, wait_s, checkpoint).run(train)

        return start

    return decorate


class ElasticJob:
    """One rank's part in a job that loses ranks: the loop around the user's function."""

    def __init__(
        self,
        state: State,
        membership: Membership | None,
        min_ranks: int,
        wait_s: float,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        self._state = state
        self._checkpoint = checkpoint
        self._min_ranks, self._wait_s = min_ranks, wait_s
        self._membership = membership
        self._generation = rendezvous.generation()
        self._random = RandomStates()
        self._group: Any = None
        self._records: RankRecords | None = None
        self._stages: StageRecords | None = None
        self._why_not_kept = ""
        self._records_generation = -1
        self._prepared_seq = (-1, -1)
        self._page = open_page(rendezvous.agent_address())
        self._page.set_generation(self._generation)
        self._used = 0  # samples of this pass, at the latest commit
        self._is_complete = True  # False while a state is only half received

    def run(self, train: Train[_Result]) -> _Result:
        """Call `train` until it has returned on all ranks."""
        self._group = dist.group.WORLD if dist.is_initialized() else None
        if self._group is None or not isinstance(self._group, PhalanxProcessGroup):
            return train(self._state)
        if _has_returned and self._membership is None and rendezvous.agent_address():
            _logger.warning(
                "phalanx.elastic: a second function is elastic.run in this job, and a rank that is lost in it ends the "
                "job. What replaces one begins with the script, and would not know that the first function has "
                "returned on the others. Put both into one function: `if state.phase == 0: ...; state.phase = 1`."
            )
            return train(self._state)
        self._membership = self._membership or self._find_agent()
        if self._membership is None:
            return train(self._state)
        self._state._runner = self
        try:
            if rehearses(self._group):
                self._state._number = -1
                self._recover(None)
            else:
                self._new_records()
            while True:
                try:
                    result = train(self._state)
                    self._finish()
                    return result
                except Exception as error:
                    if not self._is_loss(error):
                        self._membership.failed(self._state.step, f"{type(error).__name__}: {error}")
                        raise
                    loss = self._describe(error)
                    _forget(error)
                self._recover(loss)
        except JobEndedError as error:
            self._end(error)
        finally:
            _note_returned()
            self._state._runner = None
            self._membership.close()

    def _end(self, error: JobEndedError) -> NoReturn:
        """What is in memory is saved, and the process ends.

        Each survivor of a host saves, one after another; who is behind what is there already does not.
        """
        state = self._state
        if state._pipelines:  # what is left of the model has no other half
            _leave_all_groups()
            _logger.error("phalanx.elastic: %s", error)
            raise SystemExit(error.exit_code)
        state._learn_update()
        if self._is_complete and state._stepped == 2:
            state._count_as_done(state._number + 1)
        _leave_all_groups()
        saved = ""
        if self._checkpoint is not None and self._is_complete and state._number >= 0 and state._is_whole:
            state._roll_back_values()
            record = None if self._records is None else self._records.read(self._records.rank, state._number)
            if self._records is not None and record is not None:
                self._records.restore(record)
            path = Path(self._checkpoint)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                there = load_checkpoint(path) if path.exists() else {}
                if there.get("values", {}).get("step", -1) < state.step:
                    save_checkpoint(path, state.state_dict())
            finally:
                os.close(folder)
            saved = f" Step {state.step} is saved in {path}."
        _logger.error("phalanx.elastic: %s.%s", str(error).rstrip("."), saved)
        raise SystemExit(error.exit_code)

    def _find_agent(self) -> Membership | None:
        agent = rendezvous.agent_address()
        if not agent:
            return None
        try:
            return AgentChannel(
                agent, self._group.rank(), self._generation, min_ranks=self._min_ranks, wait_s=self._wait_s
            )
        except OSError as error:
            _logger.warning("phalanx.elastic: a lost rank ends the job, as its agent does not hear this one: %s", error)
            return None

    # -- while it trains -----------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """What this rank alone knows of the step is written where it outlives the rank."""
        assert self._records is not None
        self._records.prepare(self._state._number + 1)
        self._prepared_seq = self.count_collectives()

    def count_collectives(self) -> tuple[int, int]:
        """Of the default group; rounds of gradients are not among its collectives, and count as well."""
        return self._group._get_sequence_number_for_group(), self._group.num_gradient_rounds

    def require_group(self) -> None:
        """A barrier, which raises at once what has ended the group."""
        dist.barrier(group=self._group)

    def before_commit(self, number: int) -> None:
        """See to it that the record of this commit is there, on all ranks."""
        assert self._records is not None
        if self._state._pipelines:
            return  # all is written after it, when it is known what the commit changes
        if not self._records.is_prepared(number):
            self._records.prepare(number)
            self._prepared_seq = self.count_collectives()
        if self._state._rounds and self._state._stepped:
            return  # they train apart: nobody waits for anybody
        if self._group.size() > 1 and self.count_collectives() == self._prepared_seq:
            dist.barrier(group=self._group)  # no rank has waited for the others since: they may lack theirs

    def after_commit(self) -> None:
        """Here, and nowhere else, the ranks stop for others to come in."""
        assert self._membership is not None
        mark = self._state._mark
        used = 0 if mark is None else mark.used
        self._page.commit(self._state.step, used - self._used if used > self._used else used)
        self._used = used
        if self._stages is not None:
            assert self._records is not None
            self._stages.keep(self._records)
        if self._membership.newer_than(self._generation):
            raise _NewGeneration("phalanx.elastic: the job takes in other ranks")

    def _finish(self) -> None:
        """Nobody ends before all have: one who is lost now would not find its state again."""
        assert self._membership is not None
        reached(FINISH)
        if self._group.size() > 1:
            dist.barrier(group=self._group)
        self._membership.finished()

    # -- when a rank is lost -------------------------------------------------------------------------------------

    def _is_loss(self, error: BaseException) -> bool:
        """Also of an error that came through torch's C++, as that of a reducer of its own does, under another type."""
        heard = self._group.find_failure() if type(error) is RuntimeError else None
        return _is_loss(error) or (heard is not None and _is_loss(heard))

    def _describe(self, error: BaseException) -> Loss:
        ranks = tuple(getattr(error, "ranks", ()))
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Loss(self._generation, self._state.step, text, ranks)

    def _recover(self, loss: Loss | None) -> None:
        """Return when this rank is in the group of a later generation, with the state to go on from."""
        membership = self._membership
        assert membership is not None
        generation: Generation | None = None
        if loss is not None:
            reached(LOST)
            membership.report(loss)
        elif not membership.newer_than(self._generation):
            generation = Generation(self._generation, {})  # the one that this process was started for
        after = self._generation
        while True:
            if generation is None:
                generation = membership.next_generation(after)
            after = generation.number
            try:
                self._enter(generation)
            except SupersededError:
                generation = None
                continue
            except Exception as error:
                if not _is_loss(error):
                    raise
                membership.report(self._describe(error))
                _forget(error)
                generation = None
                continue
            membership.regrouped(generation.number)
            return

    def _enter(self, generation: Generation) -> None:
        membership = self._membership
        assert membership is not None
        reached(LEAVE)
        old = self._group
        timeout = timedelta(seconds=old._timeout_s)
        _leave_all_groups()
        self._generation = generation.number
        self._page.set_generation(generation.number)
        store, rank, world_size = rendezvous.enter_generation(generation.environment)
        reached(MEET)

        def check() -> None:
            if membership.newer_than(generation.number):
                raise SupersededError

        with checked_while_meeting(check), one_except_hook():
            dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size, timeout=timeout)
        self._group = dist.group.WORLD
        reached(AGREE)
        standings = self._ask_standings()
        if problem := describe_differing(standings):
            raise ValueError(
                f"phalanx.elastic, generation {generation.number}: the ranks give elastic.State different things: "
                f"{problem}.\nStart every host with the same script and the same strategy."
            )
        if self._state._pipelines:
            self._enter_stages(old, standings)
            return
        agreement = decide(standings, apart=bool(self._state._rounds))
        if agreement is None:
            raise JobEndedError(
                f"phalanx.elastic, generation {generation.number}: no rank that is left holds the whole state.\n"
                "Start again from the last checkpoint."
            )
        kept = None
        if rank == agreement.source:
            kept = [one.kept_state() for one in self._state._sharded]
        self._rebind(old, agreement)
        self._hand_over(agreement, standings, kept)

    def _ask_standings(self) -> list[Standing]:
        state = self._state
        state._learn_update()
        mine = Standing(
            number=state._number if self._stages is None else self._stages.number,
            is_whole=self._is_complete and state._is_whole,
            has_stepped=self._is_complete and state._stepped != 1,
            was_rank=-1 if self._records is None else self._records.rank,
            records_of=self._records_generation,
            form=", ".join(f"{name}={type(thing).__name__}" for name, thing in state._things.items()),
        )
        standings: list[Any] = [None] * self._group.size()
        dist.all_gather_object(standings, mine, group=self._group)
        return standings

    def _rebind(self, old: Any, agreement: Agreement) -> None:
        reached(REBIND)
        for module in self._state._modules:
            rebind_module(module, old, self._group)
        for rounds in self._state._rounds:
            rounds.regroup(self._group)
        for optimizer in self._state._sharded:
            number = [optimizer.num_updates]
            dist.broadcast_object_list(number, group=self._group, group_src=agreement.source)
            optimizer.regroup(self._group, agreement.source, number[0])

    def _hand_over(self, agreement: Agreement, standings: list[Standing], kept: list[Any] | None) -> None:
        state, rank = self._state, self._group.rank()
        receives = rank in agreement.receivers
        if state._rounds and not receives and state._stepped:
            state._count_as_done(state._number + 1)
        mine = self._find_record(state._number if state._rounds else agreement.number, standings)
        if agreement.is_ahead and not receives:
            state._count_as_done(agreement.number)
        if agreement.receivers:
            reached(HAND_OVER)
            if receives:
                self._is_complete = False
            hand_over(state._parts(), agreement.source, agreement.receivers, self._group)
        self._hand_over_sharded(agreement, kept)
        for rounds in state._rounds:
            rounds.catch_up(is_new=receives)
        reached(RESTORE)
        state._settle(rank, self._group.size())
        fresh = RankRecords(self._group, state._trained, self._random)
        if mine is not None:
            fresh.restore(mine)
        fresh.prepare(state._number)
        dist.barrier(
            group=self._group
        )  # whoever is lost from here on has left its record; until then the old ones count
        self._records, self._records_generation = fresh, self._generation
        self._is_complete = True
        self._prepared_seq = (-1, -1)
        if mine is not None and state._mark is not None:
            state._random_again = functools.partial(fresh.restore_random, mine)

    def _hand_over_sharded(self, agreement: Agreement, kept: list[Any] | None) -> None:
        """Each rank's part of it went with the old group, also where the rank is a survivor: all take new ones."""
        others = [rank for rank in range(self._group.size()) if rank != agreement.source]
        for number, optimizer in enumerate(self._state._sharded):
            part = ShardedPart(optimizer, None if kept is None else kept[number])
            if others:
                hand_over([part], agreement.source, others, self._group)
            if kept is not None:
                part.take(part.show())
            optimizer.keep_state()

    def _find_record(self, step: int, standings: list[Standing]) -> Tensor | None:
        """What this rank, or the one that it replaces, left of the step to go on from. Collective."""
        size = self._group.size()
        newest = max(one.records_of for one in standings)
        keeper = next((r for r, one in enumerate(standings) if one.records_of == newest), None)
        if keeper is None or newest < 0:
            return None
        me = standings[self._group.rank()]
        mine = None
        if self._records is not None and me.records_of == newest:
            mine = self._records.read(self._records.rank, step)
        # Who has none: the slot of the rank of its number, from somebody who maps it.
        for orphan in (r for r in range(size) if standings[r].records_of != newest):
            told = [None if self._records is None else self._records.read(orphan, step)]
            dist.broadcast_object_list(told, group=self._group, group_src=keeper)
            if orphan == self._group.rank():
                mine = told[0]
        return mine

    def _enter_stages(self, old: Any, standings: list[Standing]) -> None:
        """Every rank becomes what it had left of the last commit; a replacement what its number had left."""
        state, rank, size = self._state, self._group.rank(), self._group.size()
        require_same_stages(state, self._why_not_kept, old.size(), standings, self._group)
        newest = max(one.records_of for one in standings)
        holders = [r for r, one in enumerate(standings) if one.records_of == newest]
        keeper, number = holders[0], max(standings[r].number for r in holders)
        StageRecords.require_all(self._stages, state, number, keeper, self._group)
        reached(REBIND)
        for module in state._modules:
            rebind_module(module, old, self._group)
        rebind_sharded(state)
        record = self._find_record(number, standings)
        reached(HAND_OVER)
        StageRecords.hand_over(self._stages, state, number, keeper, holders, self._group)
        reached(RESTORE)
        state._settle(rank, size)
        fresh, stages = RankRecords(self._group, (), self._random), StageRecords(state, self._group)
        if record is not None:
            fresh.restore(record)
        stages.keep(fresh)
        self._records, self._stages, self._records_generation = fresh, stages, self._generation
        if record is not None and state._mark is not None:
            state._random_again = functools.partial(fresh.restore_random, record)

    def _new_records(self) -> None:
        models = () if self._state._pipelines else self._state._trained
        self._records = RankRecords(self._group, models, self._random)
        self._records_generation = self._generation
        if self._state._pipelines:
            self._why_not_kept = why_not_kept(self._state, self._group)
            if not self._why_not_kept:
                self._stages = StageRecords(self._state, self._group)
                self._stages.keep(self._records)
            return
        self._records.prepare(0)
        for optimizer in self._state._sharded:
            optimizer.keep_state()
        dist.barrier(group=self._group)


def _note_returned() -> None:
    global _has_returned
    _has_returned = True


def _leave_all_groups() -> None:
    """Without waiting for anybody: the dead do not answer, and the others hear it."""
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        if isinstance(group, PhalanxProcessGroup):
            group.abort()
    if dist.is_initialized():
        dist.destroy_process_group()
    # A group that never came about has been counted, and ranks that did not try would name the next one differently.
    world.group_count = 0


def _is_loss(error: BaseException) -> bool:
    """Whether this, or what it came of, is the loss of a peer, and not a mistake."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        if isinstance(
            now, (PeerLostError, DeadlineError, _NewGeneration, dist.DistBackendError, dist.DistNetworkError)
        ):
            return True
        seen.add(id(now))
        now = now.__cause__ or now.__context__
    return False


def _forget(error: BaseException) -> None:
    """Let go of the frames that the error has passed: iterators end, and so do the workers of a loader."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        if now.__traceback__ is not None:
            traceback.clear_frames(now.__traceback__)
            now.__traceback__ = None
        before, now = now, now.__cause__ or now.__context__
        before.__cause__ = before.__context__ = None
