"""The `Reducer` decides when to send each bucket during backward, and when gradients may be read.

    autograd    w4 ready   b4 ready   w3 ready ...                        backward ends
    bucket      1 missing  complete   fill, launch 0 ...                      fill, launch n
    this module                                                               wait 0 .. n, publish

A *round* begins with the first gradient and ends when all buckets hold the mean. Buckets are launched in the plan's
order on every rank: a complete bucket waits for those before it, because collectives must be issued in the same order
on every rank.

A bucket of copied gradients is filled and launched by the gradient that completes it, unless the user has hooks that
run after ours. A bucket that is reduced where autograd wrote it is launched at the next gradient, or at the end of
backward: inside a gradient's hook, autograd itself still refers to the gradient, so other references can be counted
only later (`reference_counts`).

Everything runs in autograd's thread for the module's device, so there is no lock.

    phase          backward in progress   round          next
    IDLE           none                   not started    ACCUMULATING, SYNCING
    ACCUMULATING   only accumulates       not started    SYNCING: it reaches outputs of a syncing forward; IDLE
    SYNCING        averages               either         IDLE: the round has ended; INCOMPLETE
    INCOMPLETE     none                   started        SYNCING: another backward produces the missing gradients

An exception may end a backward in any phase. The next forward then discards the round, or raises if buckets were sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._base.malloc import release_freed_memory
from phalanx._base.torch_names import find
from phalanx._comm.backend.dynamo import untraced
from phalanx.ddp.bucket import DenseBucket, SparseBucket
from phalanx.ddp.bucket_set import BucketSet
from phalanx.ddp.exchange import Exchange, PendingBucket, SparsePending
from phalanx.ddp.first_steps import FirstSteps
from phalanx.ddp.graph import ReachableLeaves, find_reach
from phalanx.ddp.plan import Bucket, BucketPlan, ParameterSpec
from phalanx.ddp.stray_gradients import StrayGradients

_engine: Any = find(
    "torch.autograd.Variable._execution_engine", loses="phalanx.DistributedDataParallel does not average gradients"
)


class ReducerPhase(Enum):
    """A `ReducerPhase` is a state of the table in the module's docstring, which lists the possible next states."""

    IDLE = "idle"
    ACCUMULATING = "accumulating"
    SYNCING = "syncing"
    INCOMPLETE = "incomplete"


TRANSITIONS: Mapping[ReducerPhase, Set[ReducerPhase]] = {
    ReducerPhase.IDLE: {ReducerPhase.ACCUMULATING, ReducerPhase.SYNCING},
    ReducerPhase.ACCUMULATING: {ReducerPhase.SYNCING, ReducerPhase.IDLE},
    ReducerPhase.SYNCING: {ReducerPhase.IDLE, ReducerPhase.INCOMPLETE},
    ReducerPhase.INCOMPLETE: {ReducerPhase.SYNCING},
}


@dataclass
class Backward:
    """A `Backward` is the backward in progress.

    Arguments:
        syncs: whether it averages gradients; otherwise it only accumulates.
        writes: whether it writes `.grad` of every parameter that it reaches, unlike torch.autograd.grad.
        fresh: for each parameter, whether this backward creates the gradient; recorded while it only accumulates.
    """

    syncs: bool
    writes: bool = False
    fresh: list[bool] | None = None


@dataclass
class Forwards:
    """`Forwards` summarizes the forwards since the last round.

    Arguments:
        latest_syncs: whether the latest forward syncs; kept after the round.
        any_syncs: whether any forward syncs.
        any_accumulates: whether any forward only accumulates.
        num_hidden: the number of syncing forwards without a graph in their outputs, whose backward is still pending.
        reach: the leaves that the forwards' outputs reach; None if unknown.
    """

    latest_syncs: bool = False
    any_syncs: bool = False
    any_accumulates: bool = False
    num_hidden: int = 0
    reach: ReachableLeaves | None = None

    def end_round(self) -> None:
        """Forget the forwards whose gradients the round has averaged."""
        self.any_syncs = self.any_accumulates = False
        self.num_hidden = max(self.num_hidden - 1, 0)
        self.reach = None


@untraced  # autograd calls it during a compiled step, with Dynamo active
class Reducer:
    """A `Reducer` averages the gradients of `parameters` over the ranks of `group`, once per backward.

    `specs` describe `parameters`, in the same order. `watch` observes the first rounds; either all ranks have one or
    none. `accumulates` returns whether this rank is in `no_sync`. If ranks share memory, construction is collective.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[nn.Parameter],
        *,
        caps_mb: Sequence[float],
        group: dist.ProcessGroup,
        as_view: bool,
        find_unused: bool,
        static_graph: bool,
        watch: FirstSteps | None = None,
        accumulates: Callable[[], bool] = lambda: False,
    ) -> None:
        self._specs = list(specs)
        self._parameters = list(parameters)
        self._group = group
        self._find_unused = find_unused and not static_graph
        self.rebuild_pending = not self._find_unused
        self._learning = static_graph  # a static graph is learnt in the first round
        self._fires_expected = [1] * len(self._parameters)
        self._idle: frozenset[int] = frozenset()  # parameters of a static graph that no rank uses
        self._watch = watch
        self._set = BucketSet(self._specs, self._parameters, caps_mb=caps_mb, group=group, as_view=as_view)

        self._accumulates = accumulates
        self._strays = StrayGradients([spec.name for spec in specs], self._parameters, group.rank())
        self._forwards = Forwards()
        self._backward: Backward | None = None
        self._used = [False] * len(self._parameters)  # whether each parameter was used since the last round
        self._num_rounds = 0
        self.rescale = 1.0  # the mean is multiplied by this factor
        self._round: Round
        self._begin_round()
        hooks = [
            register_gradient_hook(parameter, weak_hook(weakref.ref(self), Reducer.on_gradient, index))
            for index, parameter in enumerate(self._parameters)
        ]
        self._hook_ids: list[int] = [hook.id for hook in hooks]
        self._finalizers = [weakref.finalize(self, hook.remove) for hook in hooks]
        if self._set.pool is not None:
            weakref.finalize(self, self._set.pool.close).atexit = False  # tensors may outlive the exit hooks

    def close(self) -> None:
        """Remove the hooks and release the shared memory, so that another reducer can take over the parameters."""
        for finalizer in self._finalizers:
            finalizer()
        self._strays.close()
        self.end_watch()
        if self._set.pool is not None:
            self._set.pool.close()

    def set_static_graph(self) -> None:
        """Switch to static_graph=True; raise RuntimeError if a round has begun."""
        if self._num_rounds or self._round.started:
            raise RuntimeError("_set_static_graph() should be called before training loop starts")
        self._find_unused, self._learning, self.rebuild_pending = False, True, True

    def use_exchange(self, exchange: Exchange) -> None:
        """Use `exchange` for the buckets of all plans. All ranks call it before the first backward.

        Buckets are then as in PyTorch: each is one block of memory, with as many gradients as the caps allow.
        """
        self._set.use_exchange(exchange)
        self._begin_round()

    # Before and after the module's forward

    @property
    def plan(self) -> BucketPlan:
        """Return the plan of gradients in buckets."""
        return self._set.plan

    @property
    def watch(self) -> FirstSteps | None:
        """Return the watch of the first rounds; None once they are over."""
        return self._watch

    @property
    def in_backward(self) -> bool:
        return self._backward is not None

    @property
    def phase(self) -> ReducerPhase:
        if self._backward is None:
            return ReducerPhase.INCOMPLETE if self._round.started else ReducerPhase.IDLE
        return ReducerPhase.SYNCING if self._backward.syncs else ReducerPhase.ACCUMULATING

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds that have ended."""
        return self._num_rounds

    def end_watch(self) -> None:
        """End the watch of the first rounds, for example because ranks may have different rounds."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def prepare_forward(self) -> None:
        """Check that the round before this forward has ended.

        Raises:
            RuntimeError: some parameters got no gradient, or an exception ended a backward that had sent buckets.
        """
        self.end_interrupted_backward()
        if self._round.is_interrupted:
            raise interrupted(self._group.rank(), self._round.num_launched, len(self._set.buckets))
        if self._round.started:
            raise self._missing_gradients()

    def end_interrupted_backward(self) -> None:
        """Clean up after a backward that an exception ended: its gradients are not averaged."""
        if self._backward is not None:  # its last callback did not run, or failed
            self._end_backward()
            if self._round.num_launched and (self._group.size() > 1 or self._set.has_own_exchange):
                self._round.is_interrupted = True
            else:
                self._begin_round()

    def prepare_backward(self, outputs: Iterable[Tensor], *, sync: bool) -> None:
        """Record whether a backward from `outputs` syncs or only accumulates."""
        outputs = list(outputs)
        forwards = self._forwards
        forwards.latest_syncs = sync
        forwards.any_syncs |= sync
        forwards.any_accumulates |= not sync
        # A hook on the outputs' nodes detects the start of the outermost backward: with reentrant checkpointing,
        # gradients arrive in an inner backward, which ends earlier. Two forwards may also have decided differently,
        # and their backwards may come in any order.
        announce = weak_hook(weakref.ref(self), Reducer.on_begin, sync)
        nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
        for node in nodes:
            node.register_prehook(announce)
        forwards.num_hidden += sync and not nodes
        # Without find_unused, the walk only lets backward itself report missing gradients, and only in the first round:
        # most wrong models fail there, and in later rounds the next forward reports them.
        if sync and (self._find_unused or self._num_rounds == 0):
            reach = find_reach(outputs)
            forwards.reach = reach if forwards.reach is None else forwards.reach | reach

    # During backward

    def on_begin(self, sync: bool) -> None:
        """Record that a backward reached outputs of a forward that decided `sync`; a forward that syncs prevails."""
        backward = self._enter(syncs=sync)
        # torch.autograd.grad and backward(inputs=...) visit the same nodes, but write no parameter's `.grad`, or few.
        backward.writes = _engine.is_checkpoint_valid()
        if not backward.syncs and backward.fresh is None:
            backward.fresh = [parameter.grad is None for parameter in self._parameters]

    def on_gradient(self, index: int) -> None:
        """Record that autograd has written a parameter's gradient."""
        self._used[index] = True
        backward = self._backward
        if not (self._syncs_unannounced() if backward is None else backward.syncs):
            is_announced = backward is not None or self._forwards.any_accumulates
            if not is_announced and self._group.size() > 1 and not self._accumulates():
                self._strays.on_gradient(index)
            return
        if backward is None:
            self._enter(syncs=True)
        if self._round.complete:
            self._launch()
        if not self._round.started:
            self._round.started = True
            self._skip_unused()
        self._round.fires[index] += 1
        if self._watch is not None:
            self._watch.on_gradient(index)
        if self._round.ready[index]:
            raise another_gradient(self._group.rank(), self._specs[index])
        if self._learning:
            self._round.order.pop(index, None)  # the last time counts
            self._round.order[index] = None
        elif self._round.fires[index] >= self._fires_expected[index]:
            self._round.order[index] = None
            self._mark_ready(index)
            if self._round.complete and self._may_launch_at_once(index):
                self._launch()

    def _may_launch_at_once(self, index: int) -> bool:
        """Return whether the buckets that the latest gradient completed may be launched from that gradient's hook."""
        return is_last_hook(self._parameters[index], self._hook_ids[index]) and not any(
            self._set.buckets[number].may_stay_in_place for number in self._round.complete
        )

    def _syncs_unannounced(self) -> bool:
        """Return whether a backward that did not pass through an observed output syncs.

        A backward from hidden tensors of a forward syncs. A backward that belongs to no forward does not: a penalty on
        the parameters, after the backward of the loss, adds to this rank's gradients, which hold the mean, as in
        PyTorch. Between a forward that syncs and its round, either is possible; the backward then syncs.
        """
        if self._round.started:
            return True
        forwards = self._forwards
        return forwards.latest_syncs and (forwards.any_syncs or forwards.num_hidden > 0)

    def _enter(self, *, syncs: bool) -> Backward:
        """Return the current backward, or begin one. If any forward that it reaches syncs, the whole backward syncs."""
        if self._backward is None:
            self._backward = Backward(syncs)
            if self._set.pool is not None:
                self._set.pool.enter()
            _engine.queue_callback(self._leave)
        self._backward.syncs |= syncs
        return self._backward

    def _skip_unused(self) -> None:
        """Mark parameters that this backward cannot reach as ready, so that no bucket waits for them."""
        if self._learning:
            return
        if any(expected == 0 for expected in self._fires_expected):
            unused = [index for index, expected in enumerate(self._fires_expected) if expected == 0]
        elif self._find_unused and self._forwards.reach is not None and self._forwards.reach.complete:
            leaves = self._forwards.reach.leaves
            unused = [index for index, parameter in enumerate(self._parameters) if id(parameter) not in leaves]
        else:
            return
        for index in unused:
            self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        self._round.mark_ready(index, bucket=self._set.places[index][0])

    def _launch(self) -> None:
        """Fill the complete buckets, and launch buckets in order up to the first incomplete bucket."""
        complete, self._round.complete = self._round.complete, []
        for number in complete:
            bucket = self._set.buckets[number]
            bucket.fill(self._set.exchange.scale, [self._round.fires[slot.parameter] > 0 for slot in bucket.plan.slots])
        while (
            self._round.num_launched < len(self._set.buckets) and self._round.num_missing[self._round.num_launched] == 0
        ):
            bucket = self._set.buckets[self._round.num_launched]
            self._round.num_launched += 1
            if isinstance(bucket, SparseBucket):
                self._round.pending.append(SparsePending(bucket, bucket.parameters[0].grad, self._group))
            elif isinstance(bucket, DenseBucket):
                self._round.pending.append(self._set.exchange.launch(bucket))

    # At the end of backward

    def _leave(self) -> None:
        """End this backward, which autograd has completed, and the round if it is complete."""
        backward = self._backward
        if backward is None:  # a forward has already cleaned up this backward
            return
        reached_none = not self._round.started and backward.syncs and backward.writes
        if backward.fresh is not None and not backward.syncs:
            self._separate(backward.fresh)
        self._end_backward()
        if reached_none and (self._find_unused or self._learning or 0 in self._fires_expected):
            self._round.started = True  # the other ranks still wait for this rank's buckets
            self._skip_unused()
        if not self._round.started:  # this is torch.autograd.grad, or a backward that only accumulates
            return
        if self._learning or self._find_unused:
            # No more gradients will come. This is also correct for several backwards of one forward: each is a round of
            # its own, and averages gradients that are already equal, plus new local gradients.
            for index, ready in enumerate(self._round.ready):
                if not ready:
                    self._mark_ready(index)
        try:
            self._launch()
            is_complete = self._round.num_launched == len(self._set.buckets)
            if is_complete:
                self._finish()
        except BaseException:
            self._backward = backward  # the next forward starts again or raises, as after an error in a hook
            raise
        if not is_complete and self._is_hopeless():
            raise self._missing_gradients()

    def _separate(self, fresh: Sequence[bool]) -> None:
        """Give each gradient that this backward created its own memory, so that the next backward can add to it.

        AccumulateGrad adds in place, and does not check who else uses the memory: in `h + a.unsqueeze(0) +
        b.unsqueeze(0)` with one sample, the first gradients of `a` and `b` share memory, so that additions to one
        change the other. Plain PyTorch has this bug, too.
        """
        for index, (number, position) in self._set.places.items():
            if fresh[index]:
                self._set.buckets[number].separate(position)

    def _end_backward(self) -> None:
        self._backward = None
        if self._set.pool is not None:
            self._set.pool.leave()

    def _missing_gradients(self) -> RuntimeError:
        missing = [index for index, ready in enumerate(self._round.ready) if not ready]
        return missing_gradients(
            self._group.rank(),
            [self._specs[index] for index in missing],
            frozen=[self._specs[index] for index in missing if not self._parameters[index].requires_grad],
            num_parameters=len(self._specs),
            unsent=f"{len(self._set.buckets) - self._round.num_launched} of {len(self._set.buckets)}",
        )

    def _is_hopeless(self) -> bool:
        """Return whether the known graph shows that no later backward can produce the missing gradients."""
        reach = self._forwards.reach
        if reach is None or not reach.complete:
            return False
        return not any(
            id(self._parameters[index]) in reach.leaves for index, ready in enumerate(self._round.ready) if not ready
        )

    def _finish(self) -> None:
        used_by_none = self._agree_on_unused()
        for pending in self._round.pending:
            pending.wait()
        if self.rescale != 1.0 and not self._set.has_own_exchange:  # a comm hook chooses its own divisor
            for bucket in self._set.buckets:
                bucket.rescale(self.rescale)
        for bucket in self._set.buckets:
            for position, slot in enumerate(bucket.plan.slots):
                if slot.parameter not in used_by_none:
                    bucket.publish(position)
        order = [
            *self._round.order,
            *(index for index in range(len(self._parameters)) if index not in self._round.order),
        ]
        if self._learning:
            self._learning = False
            self._fires_expected, self._idle = list(self._round.fires), used_by_none
        self._begin_round()
        self._strays.on_round()
        self._forwards.end_round()
        self._used = [False] * len(self._parameters)
        self._num_rounds += 1
        if self.rebuild_pending:
            self.rebuild_pending = False
            self._rebuild(order)
        if self._watch is not None and not self._watch.compare():
            self._watch = None

    def shadow_step(self) -> None:
        """Run a round of zeros while the others reduce their gradients; keep this rank's own gradients.

        Raises:
            RuntimeError: this is the first round with static_graph=True, for which every rank needs a batch.
        """
        if self._learning:
            raise no_batch_for_graph(self._group.rank())
        shadow = ShadowRound(self._set)
        used, self._used = self._used, [False] * len(self._parameters)
        shadow.launch(self._round.pending)
        self._agree_on_unused()
        for pending in self._round.pending:
            pending.wait()
        shadow.restore()
        self._used = used
        self._begin_round()
        self._strays.on_round()
        self._num_rounds += 1
        if self.rebuild_pending:
            self.rebuild_pending = False
            self._rebuild(list(range(len(self._parameters))))

    def _agree_on_unused(self) -> frozenset[int]:
        """Return the parameters that no rank has used since the last round: their `.grad` stays as it is."""
        if not (self._learning or self._find_unused):
            return self._idle
        used = torch.tensor(self._used, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        return frozenset(index for index, flag in enumerate(used.tolist()) if not flag)

    # The plan

    def _rebuild(self, order: list[int]) -> None:
        """Plan again, in the order in which the first round's gradients became ready on rank 0.

        Called at the end of a backward: all ranks are in step there, and activations have been freed, which leaves room
        for the old and the new buckets together.
        """
        shared = torch.tensor(order, dtype=torch.int64, device=self._parameters[0].device)
        dist.broadcast(shared, group=self._group, group_src=0)
        plan = self._set.plan_in(shared.tolist())
        if plan != self.plan:
            self._set.adopt(plan, [parameter.grad for parameter in self._parameters])
            self._begin_round()
        release_freed_memory()  # the first gradients, which are now in buckets

    def _begin_round(self) -> None:
        self._round = Round([bucket.plan for bucket in self._set.buckets], len(self._parameters))


_Owner = TypeVar("_Owner")
_Argument = TypeVar("_Argument")


def weak_hook(
    owner: weakref.ref[_Owner], call: Callable[[_Owner, _Argument], None], argument: _Argument
) -> Callable[[object], None]:
    """Return a hook that calls `call(owner, argument)` while the owner lives, and does not keep the owner alive.

    The hook's attribute `keeps_grad` makes a distributed backward of `phalanx.rpc` leave the gradient in `.grad` until
    that backward ends.
    """

    @untraced
    def hook(_tensor_or_gradients: object) -> None:
        alive = owner()
        if alive is not None:
            call(alive, argument)

    hook.keeps_grad = True  # type: ignore[attr-defined]
    return hook


def is_last_hook(parameter: Tensor, hook_id: int) -> bool:
    """Return whether the hook with this id is the last one called with the parameter's gradient."""
    hooks: dict[int, object] = parameter._post_accumulate_grad_hooks
    return next(reversed(hooks)) == hook_id


def register_gradient_hook(parameter: Tensor, hook: Callable[..., None]) -> Any:
    """Register a hook for a parameter's gradient, even if the parameter is frozen for now.

    A wrapper that moves to another group keeps its parameters, some of which may have been frozen since.
    """
    trains = parameter.requires_grad
    parameter.requires_grad_()
    try:
        return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    finally:
        parameter.requires_grad_(trains)


_SHOWN = 8  # the maximum number of parameter names in a message


def interrupted(rank: int, num_launched: int, num_buckets: int) -> RuntimeError:
    """Return the error for a forward after an exception ended a backward that had launched buckets."""
    return RuntimeError(
        f"{_here(rank)}: the backward before this forward was interrupted after {num_launched} of {num_buckets} "
        "buckets had been sent, so the ranks are out of step. Let the exception that interrupted it end the job, "
        "and start again from a checkpoint."
    )


def another_gradient(rank: int, parameter: ParameterSpec) -> RuntimeError:
    """Return the error for a gradient that was written again after its bucket had been closed."""
    return RuntimeError(
        f"{_here(rank)}: parameter {parameter} received another gradient after its bucket was closed. The cause may be "
        "reentrant checkpointing of a module that is used twice, or two backwards that each reach only a part of the "
        "parameters. Pass static_graph=True if every iteration has the same graph, use checkpoint(..., "
        "use_reentrant=False), or add the losses and call backward once. With static_graph=True, the graph of this "
        "iteration differs from the first."
    )


def no_batch_for_graph(rank: int) -> RuntimeError:
    """Return the error for a rank without data that must shadow the round in which the static graph is learnt."""
    return RuntimeError(
        f"{_here(rank)}: static_graph=True learns the graph in the first step, but this rank has no batch for that "
        "step. Give every rank at least one batch."
    )


def missing_gradients(
    rank: int, missing: Sequence[ParameterSpec], *, frozen: Sequence[ParameterSpec], num_parameters: int, unsent: str
) -> RuntimeError:
    """Return the error for a backward that left `missing` without gradients; `frozen` is the frozen part of them."""
    shown = ", ".join(map(str, missing[:_SHOWN]))
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    advice = (
        f"{frozen[0]} no longer requires a gradient: freeze parameters before wrapping the module, or wrap it again."
        if frozen
        else "Every parameter must take part in the loss, through the outputs of forward. To leave some out on "
        "purpose, pass find_unused_parameters=True; freeze parameters that are never used."
    )
    return RuntimeError(
        f"{_here(rank)}: backward left {len(missing)} of {num_parameters} parameters without a gradient: {shown}{more}"
        f". {unsent} buckets could not be sent, so the gradients of this step are not averaged. {advice}"
    )


def _here(rank: int) -> str:
    return f"DistributedDataParallel on rank {rank}"


class Round:
    """A `Round` tracks gradients, which become ready in any order, and buckets, which are launched in plan order."""

    def __init__(self, buckets: Sequence[Bucket], num_parameters: int) -> None:
        self.started = False
        self.is_interrupted = False  # an exception ended the backward after buckets had been launched
        self.fires = [0] * num_parameters  # how often each gradient was written
        self.ready = [False] * num_parameters  # whether the gradient is final in this round
        self.order: dict[int, None] = {}  # parameters, in the order of their gradients
        self.num_missing = [len(bucket.slots) for bucket in buckets]
        self.complete: list[int] = []  # buckets with all gradients, which can be filled
        self.num_launched = 0
        self.pending: list[PendingBucket] = []

    def mark_ready(self, index: int, *, bucket: int) -> None:
        """Record that a parameter, which has a slot in `bucket`, gets no more gradients."""
        self.ready[index] = True
        self.num_missing[bucket] -= 1
        if self.num_missing[bucket] == 0:
            self.complete.append(bucket)


class ShadowRound:
    """A `ShadowRound` fills a set's buckets with zeros for a round, and restores their content afterwards.

    Cost: a copy of the memory of all buckets.
    """

    def __init__(self, buckets: BucketSet) -> None:
        self._set = buckets
        self._kept: dict[int, Tensor] = {
            bucket.plan.index: bucket.buffer.clone() for bucket in buckets.buckets if isinstance(bucket, DenseBucket)
        }

    def launch(self, pending: list[PendingBucket]) -> None:
        """Launch all buckets with zeros, in the plan's order; append the launched buckets to `pending`."""
        for bucket in self._set.buckets:
            if isinstance(bucket, SparseBucket):
                pending.append(SparsePending(bucket, None, self._set.group))
            elif isinstance(bucket, DenseBucket):
                bucket.in_place = None
                bucket.buffer.zero_()
                pending.append(self._set.exchange.launch(bucket))

    def restore(self) -> None:
        """Restore the content of the buckets; call this after waiting for all launched buckets."""
        for bucket in self._set.buckets:
            if isinstance(bucket, SparseBucket):
                bucket.mean = None
            elif isinstance(bucket, DenseBucket):
                bucket.buffer.copy_(self._kept[bucket.plan.index])
