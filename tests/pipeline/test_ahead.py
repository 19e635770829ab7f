"""Between hosts, receives are posted before they are needed, and header and values come in one message."""

import gc
import itertools
import random
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional

import phalanx
import phalanx.pipeline.wire
from phalanx.pipeline.execute import plan_receives
from phalanx.pipeline.schedule import SCHEDULES, plan_schedule
from phalanx.pipeline.wire import HEADER_BYTES, MOST_BYTES, Edge, FrameLengths
from phalanx.testing import run_ranks


class Neighbours:
    """A part whose values go to the next stage, and those of the first one to the last one, too."""

    def __init__(self, index, num_stages):
        last = num_stages - 1
        skips = last > 1
        self.receives = {source: () for source in ([index - 1] if index else []) + [0] * (skips and index == last)}
        self.sends = {target: () for target in ([index + 1] if index < last else []) + [last] * (skips and index == 0)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 5), (3, 4), (4, 8)])
def test_receives_are_planned_in_the_order_in_which_their_messages_are_sent(schedule, ranks, micro_batches):
    """Else what is received for one micro-batch would be another's."""
    plan = plan_schedule(schedule, ranks, micro_batches)
    sent, received = defaultdict(list), defaultdict(list)
    for rank, order in enumerate(plan.orders):
        own = {stage: Neighbours(stage, plan.num_stages) for stage in plan.stages_of(rank)}
        for kind, stage, micro_batch in order:
            targets = {"F": own[stage].sends, "W": ()}.get(kind, own[stage].receives)
            for target in targets:
                if target not in own:
                    sent[Edge(stage, target, kind != "F")].append(micro_batch)
        for awaited in plan_receives(order, own):
            assert order[awaited.at].micro_batch == awaited.micro_batch
            assert order[awaited.at].stage == awaited.edge.target
            received[awaited.edge].append(awaited.micro_batch)
    assert received == sent


def test_a_frame_is_as_long_as_the_longest_message_so_far_in_that_mode_and_never_longer_than_allowed():
    known, edge, other = FrameLengths(), Edge(0, 1), Edge(1, 2)
    known.begin(grad=True)
    known.note(edge, 1024)
    known.note(edge, 700)
    known.note(other, MOST_BYTES + 64)
    assert known.length_of(edge) == HEADER_BYTES, "not before the step went well on all ranks"
    known.end_step()
    assert (known.length_of(edge), known.length_of(other)) == (1024, HEADER_BYTES)
    known.begin(grad=False)
    assert known.length_of(edge) == HEADER_BYTES
    known.note(edge, 4096)
    known.end_step()
    known.begin(grad=True)
    known.note(edge, 640)
    known.begin(grad=True)  # a step that failed before has taught nothing
    known.end_step()
    assert known.length_of(edge) == 1024


class Fails(nn.Module):
    """In the forward or the backward of the samples that begin with a one."""

    def __init__(self, backward):
        super().__init__()
        self.layer, self.backward = nn.Linear(3, 3, bias=False), backward
        nn.init.eye_(self.layer.weight)

    def forward(self, x):
        if x[0, 0] > 0.5 and not self.backward:
            raise ArithmeticError("no result today")
        return Failing.apply(self.layer(x), self.backward)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, backward):
        ctx.fails = backward and bool(x[0, 0] > 0.5)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ArithmeticError("no result today")
        return grad, None


def _cells(world_size, micro_batches):
    """Each stage of each schedule, forward and backward, each micro-batch."""
    for schedule in SCHEDULES:
        stages = world_size * (2 if schedule == "interleaved" else 1)
        yield from itertools.product([schedule], [stages], range(stages), (False, True), range(micro_batches))


def _fail_in(rank, world_size, cells, micro_batches, steps):
    """In each cell, after so many steps that went well; then one pipeline more, of the same group."""
    wrong = []
    for schedule, stages, stage, backward, at in cells:
        layers = [Fails(backward) if index == stage else nn.Linear(3, 3) for index in range(stages)]
        for layer in layers[:stage]:
            nn.init.eye_(layer.weight), nn.init.zeros_(layer.bias)
        pipe = phalanx.Pipeline(
            nn.Sequential(*layers), micro_batches=micro_batches, schedule=schedule, loss_fn=functional.mse_loss
        )
        x = torch.zeros(2 * micro_batches, 3)
        for _ in range(steps):
            pipe.step(x, target=x)
        x[2 * at, 0] = 1.0
        try:
            pipe.step(x, target=x)
            text = "no error"
        except (ArithmeticError, phalanx.PhalanxError) as error:
            text = str(error)
        where = f"stage {stage} (rank {stage % world_size}), micro-batch {at},"
        if "no result today" not in text or where not in text or any(pipe._wire._posted.values()):
            wrong.append((schedule, stage, backward, at, text))
    pipe = phalanx.Pipeline(nn.Sequential(*(nn.Linear(3, 3) for _ in range(world_size))), loss_fn=functional.mse_loss)
    x = torch.ones(8, 3)
    return wrong, [float(pipe.step(x, target=x)) for _ in range(2)]


@pytest.mark.slow(but=("2-0",))
@pytest.mark.parametrize(("world_size", "steps"), [(2, 0), (2, 1), (3, 1)])
def test_over_gloo_a_failure_in_any_cell_is_reported_on_every_rank_and_leaves_no_receive(world_size, steps, effort):
    """Who had done its part waited until its messages were received, before it heard that the receiver had failed in
    its last backward: both waited until the timeout, which ended the group. A receive that is left in Gloo when its
    memory goes stops the whole connection.
    """
    every = list(_cells(world_size, 3))
    last = [cell for cell in every if cell[2:] == (0, True, 2)]  # the last backward of the first stage
    cells = last + random.Random(world_size + steps).sample(every, min(len(every), 4 * effort))
    results = run_ranks(_fail_in, world_size, cells, 3, steps, backend="gloo")
    for wrong, losses in results:
        assert not wrong, f"{len(wrong)} of the cells: {wrong[:3]}"
        assert losses == results[0][1]


def _interrupt(rank, world_size, interrupted):
    """Ctrl-C on one rank in its second step, whose Pipeline goes; then steps of another one, of the same group."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(world_size)))
    x = torch.ones(8, 3)

    def fail():
        pipe = phalanx.Pipeline(model, micro_batches=4, loss_fn=functional.mse_loss)
        pipe.step(x, target=x)
        act = pipe._executor._act

        def watched(action, work):
            if rank == interrupted and action[::2] == ("F", 1):
                raise KeyboardInterrupt
            act(action, work)

        pipe._executor._act = watched
        with pytest.raises((KeyboardInterrupt, phalanx.PhalanxError)) as caught:
            pipe.step(x, target=x)
        return caught.type.__name__

    error = fail()
    gc.collect()
    pipe = phalanx.Pipeline(model, micro_batches=4, loss_fn=functional.mse_loss)
    return error, [float(pipe.step(x, target=x)) for _ in range(2)]


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("interrupted", [0, 1, 2])
def test_over_gloo_an_interrupted_rank_leaves_a_usable_group(interrupted):
    """What Gloo receives for memory that is gone it never takes from the connection, nor what comes behind it."""
    results = run_ranks(_interrupt, 3, interrupted, backend="gloo")
    assert [name for name, _ in results].count("KeyboardInterrupt") == 1
    assert results[interrupted][0] == "KeyboardInterrupt"
    assert all(losses == results[0][1] for _, losses in results)
