"""`Undo` restores parameters that a dead rank left half updated: all are then from before the step, or all from after.

    rank r      arrived   sync A   copy its slices to a backup   saved   update them   done   sync B
    word[r]     4s                                               4s+1                  4s+2        s: the step's number

A rank that fails before it is done restores its slices and writes 4s+3 (failed). When a sync fails, each survivor waits
until every rank is done, has failed, is dead or has timed out, and reads the words:

    all are done, or further      the new step is complete: nothing to do
    else                          the old step: a rank that is `saved` or `done` may have changed its slices, so every
                                  survivor restores them from the backup, with the same bytes

Ranks that read at different times can see different words: a rank that was stopped between `saved` and `done` may
continue after the others have restored everything. So each step has one decision: a common word in which the first rank
to decide writes old or new by compare-and-exchange. All later ranks follow it, whether their sync failed or not. The
parameters are consistent once the last rank has followed: a rank that resumes inside its update completes its writes,
and then restores.

No rank overwrites the backup before sync A of the next step, which a survivor of a failure never reaches. So a survivor
can also copy the old step to its own memory (`before`), if the decision is new but other ranks continue from the old.

A survivor reads words without a sync after they were written, so memory order must be guaranteed: after reading `saved`
it must see the backup, after reading `done` the new parameters, and no write after `saved` may be visible before
`saved`. Plain stores of a tensor's elements keep that order on x86, but not necessarily on ARM: words go through the C
core (csrc/word.h).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.shared import shared_empty, sharing_group
from phalanx.errors import ClosedError, DeadlineError, PeerLostError
from phalanx.optim.plan import Plan
from phalanx.optim.rank_words import RankWords
from phalanx.optim.shared_parameters import SharedBlock

_ARRIVED, _SAVED, _DONE, _FAILED = range(4)
_OLD, _NEW = range(2)  # the two decisions
_POLL_S = 0.001
# The limit for a survivor to complete its update. Survivors do not wait for ranks that the sync's timeout named.
_TIMEOUT_S = 30.0


class _Region:
    """A `_Region` is a block of shared parameters, its backup, and the byte ranges that each rank writes."""

    def __init__(self, shared: SharedBlock, plan: Plan) -> None:
        self.memory = shared.memory
        self.backup: Tensor = _shared(shared.memory.numel(), torch.uint8, shared.group)
        self.ranges = [_joined([shared.byte_range(part) for part in parts]) for parts in plan]

    def save(self, rank: int) -> None:
        for start, stop in self.ranges[rank]:
            self.backup[start:stop].copy_(self.memory[start:stop])

    def restore(self, rank: int) -> None:
        for start, stop in self.ranges[rank]:
            self.memory[start:stop].copy_(self.backup[start:stop])

    def before(self) -> Tensor:
        memory = self.memory.clone()
        for start, stop in itertools.chain.from_iterable(self.ranges):
            memory[start:stop].copy_(self.backup[start:stop])
        return memory


def _shared(count: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    memory: Tensor = shared_empty(count, dtype=dtype, group=group, owner=0)
    return memory


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order, merged if less than 128 bytes apart: the gap between two parameters is included."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] < 128:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined


class Undo:
    """An `Undo` surrounds an update with two syncs; if one fails, all ranks restore the same step.

    Construction is collective.
    Cost: each rank reads and writes its slices once more per step, and the host holds the parameters twice.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank, self._world_size = group.rank(), group.size()
        self._number = 0
        self._failed_at = 0  # the step that failed or is in progress
        self._regions: list[_Region] = []
        self._words = RankWords(group)  # the common word is the decision

    def cover(self, shared: SharedBlock, plan: Plan) -> None:
        """Protect another group of parameters, too."""
        self._regions.append(_Region(shared, plan))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run the block, which updates this rank's slices, between two syncs with all ranks.

        Raises:
            PhalanxError: a rank died, left or timed out; all parameters are from before the step, or all from after it.
            ClosedError: this process left the group, or is a forked child of a rank.
        """
        ours = sharing_group(self._group)
        if ours is None or ours.symm_mem.closed:  # a forked child must not write its parent's word
            raise ClosedError(
                f"ZeroRedundancyOptimizer.step: group {self._group.group_name!r} was destroyed, or this process was "
                "forked from a rank. Construct the optimizer again, in a new group."
            )
        if self._failed_at:
            raise RuntimeError(
                f"ZeroRedundancyOptimizer.step on rank {self._rank}: step {self._failed_at} failed here, so the ranks "
                "are out of step. Let its error end the job, and start again from a checkpoint."
            )
        self._failed_at = self._number = self._number + 1
        self._publish(_ARRIVED)
        try:
            dist.barrier(group=self._group)
            self._raise_if_failed()
        except BaseException as error:
            self._publish(_FAILED)
            self._resolve(error)
            raise
        try:
            self._save()
            self._raise_if_undone()  # a rank that was stopped meanwhile need not write slices only to restore them
            yield
        except BaseException:
            self._restore(self._rank)
            self._publish(_FAILED)
            raise
        self._publish(_DONE)
        try:
            dist.barrier(group=self._group)
            self._raise_if_failed()
            self._decide(_NEW)  # unless a rank whose sync failed has decided
            self._raise_if_undone()
        except BaseException as error:
            self._resolve(error)
            raise
        self._failed_at = 0

    @property
    def number(self) -> int:
        """Return the number of the step that the parameters are from; equal on all ranks that know the decision."""
        decided = self._decision()
        if self._failed_at and not (decided is not None and decided[0] == _NEW):
            return self._number - 1
        return self._number

    @property
    def latest_started(self) -> int:
        """Return the number of the latest step that has started on this rank."""
        return self._number

    def before(self) -> list[Tensor]:
        """Return a copy of each block as it was before the latest update. Call this before the next update starts."""
        return [region.before() for region in self._regions]

    def start_from(self, number: int) -> None:
        """Give the next step the number `number` + 1. All ranks call it, before the first step."""
        self._number = number
        self._words.store(4 * number)
        if self._rank == 0:
            self._words.exchange_common(self._words.load_common(), 2 * self._world_size * number)
        dist.barrier(group=self._group)

    def _publish(self, phase: int) -> None:
        self._words.store(4 * self._number + phase)

    def _word(self, rank: int) -> int:
        return self._words.load(rank)

    def _save(self) -> None:
        for region in self._regions:
            region.save(self._rank)
        self._publish(_SAVED)

    def _restore(self, rank: int) -> None:
        if self._word(rank) in (4 * self._number + _SAVED, 4 * self._number + _DONE):
            for region in self._regions:
                region.restore(rank)

    def _raise_if_failed(self) -> None:
        """Raise if a rank has failed in this step: a later barrier of that rank may have completed this barrier."""
        failed = [rank for rank in range(self._world_size) if self._word(rank) == 4 * self._number + _FAILED]
        if failed:
            raise PeerLostError(
                f"ZeroRedundancyOptimizer.step {self._number} on rank {self._rank}: rank {failed[0]} failed in this "
                "step. All parameters have their values from before the step. Read the log of that rank first.",
                ranks=tuple(failed),
            )

    def _raise_if_undone(self) -> None:
        decision, decider = self._decision() or (_NEW, self._rank)
        if decision == _OLD:
            raise PeerLostError(
                f"ZeroRedundancyOptimizer.step {self._number} on rank {self._rank}: rank {decider} undid this step "
                "after a failure. All parameters have their values from before the step. Read the log of that rank "
                "first.",
                ranks=(decider,),
            )

    def _decision(self) -> tuple[int, int] | None:
        """Return the decision on the latest step, and the rank that made it; None before there is one."""
        number, decided = divmod(self._words.load_common(), 2 * self._world_size)
        return divmod(decided, self._world_size) if number == self._number else None

    def _decide(self, decision: int) -> int:
        """Decide on this step, unless another rank has decided; return the decision of the first rank."""
        before = self._words.load_common()
        if before < 2 * self._world_size * self._number:  # a rank that loses this race finds the winner's decision
            word = 2 * self._world_size * self._number + decision * self._world_size + self._rank
            self._words.exchange_common(before, word)
        decided = self._decision()
        assert decided is not None  # no rank begins the next step without this rank
        return decided[0]

    def _resolve(self, error: BaseException) -> None:
        """After `error` at a sync, agree with the other survivors on the old or the new step, and restore the old."""
        words = [self._word(rank) for rank in range(self._world_size)]
        if min(words) < 4 * self._number:
            return  # some rank never arrived, so none passed sync A
        self._wait_for_others(error.missing if isinstance(error, DeadlineError) else ())
        completed = all(_completed(self._word(rank), self._number) for rank in range(self._world_size))
        if self._decide(_NEW if completed else _OLD) == _NEW:
            return
        for rank in range(self._world_size):
            self._restore(rank)

    def _wait_for_others(self, late: Collection[int]) -> None:
        deadline, ours = Deadline.after(_TIMEOUT_S), sharing_group(self._group)
        assert ours is not None  # the words are in the group's memory
        for rank in range(self._world_size):
            if rank != self._rank and rank not in late:
                deadline.wait_until(partial(self._is_done_or_lost, ours.symm_mem.core, rank), _POLL_S)

    def _is_done_or_lost(self, core: Any, rank: int) -> bool:
        return self._word(rank) >= 4 * self._number + _DONE or not core.alive(rank)


def _completed(word: int, number: int) -> bool:
    return word >= 4 * (number + 1) or word == 4 * number + _DONE
