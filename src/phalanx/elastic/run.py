"""`elastic.run` calls a training function again after each loss of ranks, until it returns on every rank."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from phalanx._base.log import get_logger
from phalanx._base.storage.address import is_address, place_of
from phalanx._base.torch_names import find
from phalanx._comm.backend import rendezvous
from phalanx._comm.backend.shared import default_group, is_joining
from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx.checkpoint import load_checkpoint, save_checkpoint
from phalanx.checkpoint.blame import is_plain
from phalanx.elastic.channel import AgentChannel
from phalanx.elastic.generations import (
    GenerationNotice,
    Generations,
    JobEndedError,
    JobEndedExit,
    LeaveError,
    NoGenerationError,
    RankLoss,
    SupersededError,
)
from phalanx.elastic.group import ElasticGroup
from phalanx.elastic.groups import leave_all_groups
from phalanx.elastic.losses import forget, is_loss, is_mismatch
from phalanx.elastic.points import LOST, reached
from phalanx.elastic.state import State, commits_of
from phalanx.errors import DeadlineError, summary_of

tree_map: Any = find(
    "torch.utils._pytree.tree_map", loses="a job whose state holds NumPy numbers cannot save its last checkpoint"
)
_logger = get_logger(__name__)
_Result = TypeVar("_Result")
_running: State | None = None
_has_begun = False  # whether this process has started an `elastic.run` under an agent
Train = Callable[[State], _Result]


def run(
    state: State,
    *,
    min_ranks: int = 1,
    wait_s: float = 60.0,
    checkpoint: str | os.PathLike[str] | None = None,
    membership: Generations | None = None,
) -> Callable[[Train[_Result]], Callable[..., _Result]]:
    """Decorate the function that trains `state`, so that it continues when ranks are lost or join.

        @phalanx.elastic.run(state)
        def train(state):
            for epoch in state.epochs(10):
                for batch in loader:
                    ...
                    optimizer.step()
                    state.commit()

        train(state)

    `train(state)` returns what the function returns, once it has returned on all ranks. When a rank is lost, the
    current operation fails on the others. The error ends the function, a new group is formed, all ranks restore the
    latest step that any of them completed, and the function is called again. Nothing else is repeated: the script does
    not restart, and objects created outside the function survive. Without `phalanx run` the function is called once.

    Arguments:
        min_ranks: with fewer ranks the job pauses, and keeps its state in memory.
        wait_s: how many seconds the job waits for more ranks before it ends.
        checkpoint: the local file to which `state.state_dict()` is saved if the job ends for lack of ranks.
        membership: the source of membership decisions; by default the agent of `phalanx run`.

    `sys.exit(0)` in the function returns from it, and ends the process once all ranks have returned. So does
    `sys.exit(75)` (EX_TEMPFAIL), with which all ranks ask to be started again later. Any other exit code counts as the
    loss of the rank that exits.

    The loss of a rank in a script's second `elastic.run` ends the job, because a replacement would begin with the first
    run, which the other ranks have finished. Put both runs into one function.

    Raises:
        Exception: any error that the function raises, unless it is the loss of a peer.
        TypeError: `state` is not a State, the function is a method, or it is called with another argument than `state`.
        PhalanxError: a rank was lost, and no new group will be formed.
        RuntimeError: the function is called inside another function that `elastic.run` decorates.
        ValueError: `state` holds an object whose state a replacement could not receive, such as a Pipeline;
            `checkpoint` is an fsspec address; or the ranks' States differ when a new group is formed.
        SystemExit: fewer than `min_ranks` for longer than `wait_s`, or no remaining rank holds the whole state, with
            exit code 75; or the host of this rank leaves the job (SIGTERM), with 0.
    """

    if not isinstance(state, State):
        raise TypeError(
            f"elastic.run: expected a State, but got a {type(state).__name__}. Write @phalanx.elastic.run(state), with "
            "state = phalanx.elastic.State(model=model, ...)"
        )
    if is_address(checkpoint):
        raise ValueError(
            f"elastic.run: checkpoint={os.fspath(checkpoint or '')!r} is not a local file. The last ranks of a host "
            "save one after another, which needs a file lock. Name a local file, and save to this address with a "
            "CheckpointManager."
        )

    def decorate(train: Train[_Result]) -> Callable[..., _Result]:
        if isinstance(train, types.FunctionType) and train.__code__.co_varnames[:1] == ("self",):
            raise TypeError(
                f"elastic.run: {train.__name__} is a method, so `self` would receive the state. Decorate a function "
                f"whose only argument is the state, or call phalanx.elastic.run(state)(self.{train.__name__})(state)"
            )

        @functools.wraps(train)
        def start(*given: Any) -> _Result:
            if given not in ((), (state,)):
                raise TypeError(f"{train.__name__} trains only the state that was passed to phalanx.elastic.run")
            return ElasticJob(state, membership, min_ranks, wait_s, checkpoint).run(train)

        return start

    return decorate


class ElasticJob:
    """`ElasticJob` runs the user's function in a loop on one rank of a job that may lose ranks."""

    def __init__(
        self,
        state: State,
        membership: Generations | None,
        min_ranks: int,
        wait_s: float,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        self._state, self._commits = state, commits_of(state)
        self._checkpoint = None if checkpoint is None else Path(place_of(checkpoint))
        # the stamp of another job's file, or of the checkpoint that this job resumes
        self._older = _stamp(self._checkpoint)
        self._min_ranks, self._wait_s = min_ranks, wait_s
        self._membership = membership

    def run(self, train: Train[_Result]) -> _Result:
        world: Any = default_group()
        if phalanx_group(world) is None:
            return train(self._state)
        if _running is not None:
            raise RuntimeError(
                f"phalanx.elastic: {_name(train)} is decorated by elastic.run, but was called inside another such "
                "function. After a loss the outer function is called again, and a replacement would receive only the "
                "outer state.\n"
                f"Put the inner state's objects into the outer state, and call {_name(train)} without elastic.run."
            )
        if self._membership is None and rendezvous.agent_address() and _is_second_run(train):
            return train(self._state)
        membership = self._membership or self._find_agent(world.rank())
        if membership is None:
            return train(self._state)
        with _only_one(self._state):
            return self._run(train, world, membership)

    def _run(self, train: Train[_Result], world: Any, membership: Generations) -> _Result:
        commits = self._commits
        commits.objects.refuse_unsupported(world.size())
        if self._checkpoint is not None:
            self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        group = commits.tracker.runner = ElasticGroup(commits, world, membership, _name(train))
        del world  # so that an old group is released when the next one is formed
        is_new = is_joining(group.process_group)
        has_begun = False
        watch = commits.tracker.watch_other_optimizers()
        try:
            if is_new:
                commits.latest.number = -1
                self._recover(group, membership, None)
                has_begun = True
            while True:
                try:
                    if not has_begun:
                        has_begun = True
                        group.start()
                    end: SystemExit | None = None
                    try:
                        result = train(self._state)
                    except SystemExit as asked:
                        if asked.code not in (None, 0, os.EX_TEMPFAIL):
                            raise
                        end = asked
                    group.finish()
                    if end is not None:
                        raise end
                    return result
                except Exception as error:
                    lost = group.find_loss(error)
                    if lost is None:
                        membership.failed(self._state.step, summary_of(error))
                        raise
                    loss = self._describe(group, lost)
                    forget(error)
                self._recover(group, membership, loss, lost)
        except JobEndedError as error:
            self._end(group, error)
        except LeaveError:
            leave_all_groups()
            raise SystemExit(0) from None
        finally:
            watch.remove()
            commits.tracker.runner = None
            membership.close()

    def _end(self, group: ElasticGroup, error: JobEndedError) -> NoReturn:
        """Save this rank's state to the checkpoint, and end the process.

        The survivors of a host save one after another; a rank whose step is not later than the saved one does not save.
        """
        state, commits = self._state, self._commits
        commits.tracker.undo_update(state.step)
        if group.is_complete and commits.tracker.stepped == 2:
            commits.count_as_done(commits.latest.number + 1)
        leave_all_groups()
        saved = ""
        is_whole = group.is_complete and commits.latest.number >= 0 and commits.tracker.is_whole
        if self._checkpoint is not None and is_whole:
            commits.roll_back_values()
            group.restore_own()
            path = self._checkpoint
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                step = -1 if _stamp(path) == self._older else load_checkpoint(path)["values"]["step"]
                if step < state.step:
                    save_checkpoint(path, drop_unreadable(state.state_dict()))
            finally:
                os.close(folder)
            saved = f" Step {max(step, state.step)} is saved in {path}."
        _logger.error("phalanx.elastic: %s.%s", str(error).rstrip("."), saved)
        raise JobEndedExit(error.exit_code)

    def _find_agent(self, rank: int) -> Generations | None:
        agent = rendezvous.agent_address()
        if not agent:
            return None
        try:
            number = rendezvous.generation()
            return AgentChannel(agent, rank, number, min_ranks=self._min_ranks, wait_s=self._wait_s)
        except OSError as error:
            _logger.warning("phalanx.elastic: a lost rank ends the job, as this rank cannot reach its agent: %s", error)
            return None

    def _describe(self, group: ElasticGroup, error: BaseException) -> RankLoss:
        ranks = tuple(getattr(error, "ranks", ()))
        text = summary_of(error).splitlines()[0]
        return RankLoss(group.generation, self._state.step, text, ranks, is_mismatch(error))

    def _recover(
        self,
        group: ElasticGroup,
        membership: Generations,
        loss: RankLoss | None,
        cause: BaseException | None = None,
    ) -> None:
        """Wait until this rank is in the group of a later generation, with the state to resume from.

        Raises:
            `cause`, or the loss in a later generation: no other generation will be formed.
        """
        generation: GenerationNotice | None = None
        if loss is not None:
            reached(LOST)
            membership.report(loss)
        elif not membership.newer_than(group.generation):
            generation = GenerationNotice(group.generation, {})  # the generation in which this process was started
        after = group.generation
        while True:
            if generation is None:
                try:
                    generation = membership.next_generation(after, group.timeout_s)
                except (NoGenerationError, DeadlineError) as none:
                    if cause is None:
                        raise
                    raise cause from none.with_traceback(None)
            after = generation.number
            try:
                group.enter(generation)
            except SupersededError:
                generation = None
                continue
            except Exception as error:
                if not is_loss(error):
                    raise
                membership.report(self._describe(group, error))
                cause = error
                forget(error)
                generation = None
                continue
            membership.regrouped(generation.number)
            return


def _name(train: Any) -> str:
    return str(getattr(train, "__name__", "the function"))


def _is_second_run(train: Any) -> bool:
    """Return whether this process has started an `elastic.run` before; if so, log that a loss in this one is final."""
    global _has_begun
    is_second, _has_begun = _has_begun, True
    if is_second:
        _logger.warning(
            "phalanx.elastic: %s is the second elastic.run of this script, so the loss of a rank in it ends the job: "
            "a replacement would start with the first elastic.run. Put both runs into one function: "
            "`if state.phase == 0: ...; state.phase = 1`.",
            _name(train),
        )
    return is_second


@contextlib.contextmanager
def _only_one(state: State) -> Iterator[None]:
    """Record `state` as the state that this process trains, inside this context."""
    global _running
    _running = state
    try:
        yield
    finally:
        _running = None


def _stamp(path: Path | None) -> tuple[int, ...]:
    """Return a stamp that distinguishes a file from one that later replaces it."""
    if path is None:
        return ()
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def drop_unreadable(state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` without plain values and objects' states that torch.load refuses: one makes the file unreadable.

    NumPy scalars become Python numbers. The state of such an object becomes None.
    """
    numpy = sys.modules.get("numpy")

    def readable(value: Any) -> Any:
        if numpy is None or is_plain(value):
            return value
        return tree_map(lambda leaf: leaf.item() if isinstance(leaf, numpy.generic) else leaf, value)

    objects = {name: readable(value) for name, value in state["objects"].items()}
    values = {name: readable(value) for name, value in state["values"].items()}
    left_out = [f"{name!r} (a {type(value).__name__})" for name, value in values.items() if not is_plain(value)]
    left_out += [f"the state of {name!r}" for name, value in objects.items() if not is_plain(value)]
    kept = {name: value for name, value in values.items() if is_plain(value)}
    objects = {name: value if is_plain(value) else None for name, value in objects.items()}
    if left_out:
        _logger.warning(
            "phalanx.elastic: not saved in the checkpoint, because torch.load would refuse it: %s", ", ".join(left_out)
        )
    return {**state, "objects": objects, "values": kept}
