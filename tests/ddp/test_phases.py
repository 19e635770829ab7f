"""The phases of a reducer follow each other as its table says, in drawn steps of a model with two outputs."""

import contextlib
import itertools
import random

import torch
from tests.on_ranks import on_ranks
from torch import nn

import phalanx
from phalanx.ddp.reducer import TRANSITIONS, ReducerPhase


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.one(x), self.other(x)


def step(ddp, phases, kind):
    """Take a step of this kind, and add the phases before it, in each gradient's hook and after each backward."""

    def look(*_):
        phases.append(ddp._reducer.phase)

    hooks = [parameter.register_post_accumulate_grad_hook(look) for parameter in ddp.parameters()]
    look()
    with ddp.no_sync() if kind == "accumulates" else contextlib.nullcontext():
        one, other = ddp(torch.randn(4, 3))
        if kind == "apart":
            one.sum().backward()
            look()
            other.sum().backward()
        else:
            (one.sum() + other.sum()).backward()
    look()
    for hook in hooks:
        hook.remove()


@on_ranks(2)
def test_drawn_steps_go_through_the_phases_of_the_table(rank):
    draw = random.Random(7)  # the same on both ranks
    torch.manual_seed(rank)
    ddp = phalanx.DistributedDataParallel(TwoOutputs(), check=False)
    inside = {
        "accumulates": ReducerPhase.ACCUMULATING,
        "apart": ReducerPhase.INCOMPLETE,
        "at once": ReducerPhase.SYNCING,
    }
    phases, kinds = [ReducerPhase.IDLE], set()
    for _ in range(20):
        kind = draw.choice(sorted(inside))
        before = len(phases)
        step(ddp, phases, kind)
        assert phases[-1] is ReducerPhase.IDLE, kind
        assert inside[kind] in phases[before:], kind
        kinds.add(kind)
    assert kinds == set(inside)
    for one, other in itertools.pairwise(phases):
        assert other is one or other in TRANSITIONS[one], (one, other)
