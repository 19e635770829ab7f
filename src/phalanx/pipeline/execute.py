"""Execute a rank's part of a schedule, action by action: receive, compute, send, and record the waiting time."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from phalanx._base.partition.parts import LayerRange
from phalanx._comm.diagnostics.step_notes import note_wait
from phalanx.errors import DeadlineError, PeerLostError, summary_of
from phalanx.pipeline.batchnorm import MiniBatchStatistics
from phalanx.pipeline.failure import StageFailedError, StageLostError, describe_failure, draw_failure, with_note
from phalanx.pipeline.micro_batch_random import MicroBatchRandom
from phalanx.pipeline.nested import tree_map
from phalanx.pipeline.progress import StepPhase, StepProgress
from phalanx.pipeline.schedule import Action, PipelineSchedule
from phalanx.pipeline.stage import Stage, flat_tensors
from phalanx.pipeline.values import ValueShapes
from phalanx.pipeline.wire import AHEAD, Edge, StepPlan, Wire


@dataclass
class StepWork:
    """`StepWork` has a step's inputs and results on this rank; the first stage uses `inputs`, the last `finish`."""

    training: bool
    """Whether the modules are in training mode. If so, random states are sent with the values, for dropout."""
    grad: bool
    recompute: str
    statistics: MiniBatchStatistics
    plan: Callable[[int], PipelineSchedule]
    """A function that returns the schedule for the step's number of micro-batches."""
    inputs: Sequence[dict[fx.Node, Any]] = ()
    rows: Sequence[int] = ()
    finish: Callable[[int, StepPlan, dict[fx.Node, Any]], Any] | None = None
    """A function that the last stage calls with each micro-batch's result; with `grad` it returns the loss."""
    results: dict[int, Any] = field(default_factory=dict)
    seed: int = 0
    """The seed for the first micro-batch's random numbers, in training."""


class Executor:
    """An `Executor` runs schedules on the stages of this rank."""

    def __init__(
        self,
        stages: Sequence[Stage],
        wire: Wire,
        rank: int,
        num_stages: int,
        random: MicroBatchRandom,
        step: StepProgress,
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self._wire = wire
        self._rank = rank
        self._num_stages = num_stages
        self._random = random
        self._local: defaultdict[Edge, deque[Any]] = defaultdict(deque)
        """Values and gradients sent between stages of this rank, and a received message that no action has used yet."""
        self._forms = ValueShapes()
        self._step = step

    def run(self, work: StepWork) -> None:
        """Execute this rank's actions; afterwards `work` has the results.

        Any error of an action is raised, with its place in the schedule, after the waiting ranks are notified.
        """
        program_state = self._random.get() if work.training else None
        self._forms.begin()
        step = self._step
        try:
            first = min(self.stages)
            step.act(Action("F", first, 0))
            micro_batches = len(work.inputs)
            if first:  # the first message contains the number of micro-batches
                received = self._receive(first - 1, first)
                micro_batches = received[1].micro_batches
                self._local[Edge(first - 1, first)].append(received)
            schedule = step.schedule = work.plan(micro_batches)
            for stage in self.stages.values():
                stage.begin(schedule.in_flight(stage.index))
            work.seed = self._random.draw_seed() if work.training else 0
            order = schedule.orders[self._rank]
            receives: list[AwaitedMessage] = []
            if self._wire.posts_ahead:
                receives = plan_receives(order, {index: stage.part for index, stage in self.stages.items()})
            queue = ReceiveQueue(receives[1:] if first else receives, self._wire, self.stages, step)
            for at, action in enumerate(order):
                step.act(action)
                queue.post(at)
                self._act(action, work)
            step.complete()
        except BaseException as error:
            raise self._fail(error) from error.__cause__
        finally:
            if program_state is not None:
                self._random.set(program_state)
                self._random.draw_seed()
            for stage in self.stages.values():
                stage.in_flight.clear()
            self._local.clear()

    def _act(self, action: Action, work: StepWork) -> None:
        stage = self.stages[action.stage]
        if action.kind == "F":
            self._forward(stage, action.micro_batch, work)
        elif action.kind == "W":
            stage.backward_weights(action.micro_batch)
        else:
            self._backward(stage, action.micro_batch, work, later_weights=action.kind == "I")

    # -- forward -------------------------------------------------------------------------------------------------

    def _forward(self, stage: Stage, micro_batch: int, work: StepWork) -> None:
        inputs: dict[fx.Node, Any] = {}
        leaves: dict[int, list[Tensor]] = {}
        state: Tensor | None = None
        if stage.index == 0:
            inputs = dict(work.inputs[micro_batch])
            step = StepPlan(len(work.inputs), work.rows[micro_batch], sum(work.rows), work.seed + micro_batch)
        else:
            values, step = self._receive(stage.index - 1, stage.index)
            if step.has_state:
                state, *values = values
            self._unpack(stage, stage.index - 1, values, inputs, leaves)
            for source in stage.part.receives:
                if source != stage.index - 1:
                    values, _ = self._receive(source, stage.index)
                    self._unpack(stage, source, values, inputs, leaves)
        assert self._step.schedule is not None
        if work.grad:
            for source in stage.part.receives:  # `source` sent the values after it had received `count` gradients
                if source not in self.stages:
                    count = self._step.schedule.backwards_before[source, micro_batch]
                    with self._step.sending_to(source):
                        self._wire.release_sent(Edge(stage.index, source, True), count)
        if stage.part.receives or stage.index:
            note_wait(time.perf_counter() - self._step.turn, "stages")
        if work.training:
            if state is None:
                self._random.seed(step.seed)
            else:
                self._random.set(state)
            before = self._random.get()
        finish = None
        if stage.index == self._num_stages - 1 and work.finish is not None:
            finish = partial(work.finish, micro_batch, step)
        recompute = work.grad and (
            work.recompute == "always" or (work.recompute == "except_last" and micro_batch < step.micro_batches - 1)
        )
        with work.statistics.measured():
            sends, made = stage.forward(
                micro_batch,
                inputs,
                leaves,
                training=work.grad,
                in_training=work.training,
                recompute=recompute,
                finish=finish,
                making=self._wire.making,
            )
        if finish is not None:
            work.results[micro_batch] = made.detach() if isinstance(made, Tensor) else made
        for target, nodes in stage.part.sends.items():
            self._forms.check(stage.part, micro_batch, step.rows, nodes, sends[target][0])
        step = step._replace(has_state=False, micro_batch=micro_batch)
        for target in dict.fromkeys([stage.index + 1, *sends]):
            if target == self._num_stages:
                continue
            values, needs = sends.get(target, ([], []))
            if target == stage.index + 1 and work.training:
                now = self._random.get()
                if state is not None or not torch.equal(before, now):
                    drawn = step._replace(has_state=True)
                    self._send(Edge(stage.index, target), [now, *values], [False, *needs], drawn)
                    continue
            self._send(Edge(stage.index, target), values, needs, step)

    def _unpack(
        self,
        stage: Stage,
        source: int,
        values: Sequence[Any],
        inputs: dict[fx.Node, Any],
        leaves: dict[int, list[Tensor]],
    ) -> None:
        nodes = stage.part.receives.get(source, ())
        inputs.update(zip(nodes, values, strict=True))
        if wanted := [tensor for tensor in flat_tensors(values) if tensor.requires_grad]:
            leaves[source] = wanted

    def _send(self, edge: Edge, values: list[Any], needs: list[bool], step: StepPlan) -> None:
        if edge.target not in self.stages:
            with self._step.sending_to(edge.target):
                self._wire.send_values(edge, values, needs, step)
            return
        wanted = iter(needs)
        own = tree_map(lambda v: v.detach().requires_grad_(next(wanted)) if isinstance(v, Tensor) else v, values)
        self._local[edge].append((own, step))

    def _receive(self, source: int, target: int) -> tuple[list[Any], StepPlan]:
        edge = Edge(source, target)
        if source in self.stages or self._local[edge]:
            values, step = self._local[edge].popleft()
            return values, step
        with self._step.waiting_for(source):
            return self._wire.receive_values(edge)

    # -- backward ------------------------------------------------------------------------------------------------

    def _backward(self, stage: Stage, micro_batch: int, work: StepWork, *, later_weights: bool) -> None:
        pending = stage.in_flight[micro_batch]
        began = time.perf_counter()
        if pending.recompute:
            with work.statistics.paused():
                stage.recompute(micro_batch)
        assert self._step.schedule is not None
        is_last = self._step.schedule.last_backward.get(stage.index) == micro_batch
        stage.prepare_backward(micro_batch, later_weights=later_weights, is_last=is_last)
        recomputed = time.perf_counter() - began
        grads: dict[int, list[Tensor | None]] = {}
        for target, tensors in pending.outputs.items():
            if not tensors:
                grads[target] = []
            elif target in self.stages:
                grads[target] = self._local[Edge(target, stage.index, True)].popleft()
            else:
                with self._step.waiting_for(target):
                    grads[target] = self._wire.receive_gradients(Edge(target, stage.index, True), tensors)
                with self._step.sending_to(target):
                    self._wire.release_sent(Edge(stage.index, target), micro_batch + 1)  # `target` has received them
        note_wait(time.perf_counter() - recomputed - self._step.turn, "stages")
        with self._wire.making():
            made = stage.backward(micro_batch, grads)
        for source, found in made.items():
            if source in self.stages:
                self._local[Edge(stage.index, source, True)].append(found)
            else:
                with self._step.sending_to(source):
                    edge = Edge(stage.index, source, True)
                    self._wire.send_gradients(edge, found, StepPlan(0, 0, 0, micro_batch=micro_batch))
        if not later_weights:
            stage.backward_weights(micro_batch)

    # -- failure -------------------------------------------------------------------------------------------------

    def refuse(self, error: BaseException) -> BaseException:
        """Notify the ranks that wait for this rank of an error outside of its actions; return the error to raise."""
        self._step.forget_action()
        return self._fail(error)

    def notify_end(self, error: BaseException) -> None:
        """Notify all neighbours of an error after this rank's last action: they may be in the next step already."""
        text = f"Pipeline: rank {self._rank}, at the end of a step: {summary_of(error)}"
        lost = isinstance(error, PeerLostError)
        self._wire.notify_failure(self._edges(), text, lost=lost, waits=True, between_steps=True)

    def _fail(self, error: BaseException) -> BaseException:
        """Notify all ranks that wait for this rank of an error; return the error to raise here."""
        where = describe_failure(self._step, self.stages, self._rank)
        if isinstance(error, (StageFailedError, StageLostError)):
            text = str(error)
            raised: BaseException = type(error)(f"{where}\n{text}")
        else:
            drawn = draw_failure(self._step.schedule, self._step.at)
            text = "\n".join([f"{where}: {summary_of(error)}", *drawn])
            raised = with_note(error, "\n".join([where, *drawn]))
        leaves = not isinstance(error, Exception) or isinstance(error, (PeerLostError, DeadlineError))
        if (
            self._step.phase is StepPhase.WAITING
        ):  # any error except another stage's notice then means that the group has failed
            leaves = leaves or not isinstance(error, StageFailedError)
        self._step.fail(raised, leaves=leaves)
        self._wire.notify_failure(self._edges(), text, lost=isinstance(error, PeerLostError), waits=leaves)
        return raised

    def _edges(self) -> list[Edge]:
        """Return all edges on which another rank may wait for this rank."""
        edges, last = [], self._num_stages - 1
        for stage in self.stages.values():
            targets = dict.fromkeys([stage.index + 1, *stage.part.sends])
            edges += [Edge(stage.index, t) for t in targets if t <= last and t not in self.stages]
            edges += [Edge(stage.index, s, True) for s in stage.part.receives if s not in self.stages]
        return edges


class AwaitedMessage(NamedTuple):
    """An `AwaitedMessage` is a message from another rank, and the action of this rank that needs it."""

    at: int
    """The action's position in the rank's order."""
    edge: Edge
    micro_batch: int


def plan_receives(order: Sequence[Action], own: Mapping[int, LayerRange]) -> list[AwaitedMessage]:
    """Return the messages from other ranks that these actions need, in order. `own` maps this rank's stages to parts.

    The result includes every gradient that might be sent; some values may turn out to need none.
    """
    found = []
    for at, (kind, stage, micro_batch) in enumerate(order):
        part = own[stage]
        if kind == "F":
            sources = dict.fromkeys([stage - 1, *part.receives]) if stage else ()
            edges = [Edge(source, stage) for source in sources if source not in own]
        elif kind == "W":
            edges = []
        else:
            edges = [Edge(target, stage, True) for target in part.sends if target not in own]
        found += [AwaitedMessage(at, edge, micro_batch) for edge in edges]
    return found


class ReceiveQueue:
    """A `ReceiveQueue` posts the receives of a step before the actions that need them."""

    def __init__(
        self, receives: Sequence[AwaitedMessage], wire: Wire, stages: Mapping[int, Stage], step: StepProgress
    ) -> None:
        """Queue the receives of a step; `stages` are the stages of this rank."""
        self._receives = deque(receives)
        self._wire = wire
        self._stages = stages
        self._step = step
        self._posted_for: list[int] = []
        """The positions of later actions, in order, one for each posted receive."""

    def post(self, at: int) -> None:
        """Post the receives of the action at this position, and up to `AHEAD` receives of later actions.

        Only messages that are sure to arrive get a receive. So the queue stops at the gradient of a value that this
        stage has not computed yet.
        """
        if not self._receives:
            return
        self._posted_for = [other for other in self._posted_for if other > at]
        while self._receives:
            awaited = self._receives[0]
            if awaited.at > at and len(self._posted_for) >= AHEAD:
                return
            if awaited.edge.backward:
                pending = self._stages[awaited.edge.target].in_flight.get(awaited.micro_batch)
                if pending is None:
                    return
                if not pending.outputs.get(awaited.edge.source):
                    self._receives.popleft()
                    continue
            self._receives.popleft()
            with self._step.sending_to(awaited.edge.source):
                self._wire.post(awaited.edge)
            if awaited.at > at:
                self._posted_for.append(awaited.at)
