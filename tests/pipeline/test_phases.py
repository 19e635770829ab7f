"""The phases of a step follow each other as their table says, in drawn steps of which some fail."""

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import phalanx
from phalanx.pipeline import progress
from phalanx.pipeline.progress import FAILURES, TRANSITIONS, StepPhase, StepProgress
from phalanx.pipeline.schedule import SCHEDULES
from phalanx.testing import run_ranks

P = StepPhase
# The last phase of the rank where a step fails, and of the others.
ENDS = {
    "refused": (P.ABORTED, P.ABORTED),
    "raises": (P.ABORTED, P.ABORTED),
    "interrupted": (P.LEFT, P.LEFT),
    "disagrees": (P.LEFT, P.LEFT),
    "raises after it": (P.LEFT, P.LEFT),
}


def test_the_table_in_the_docstring_is_this_one():
    drawn, phase = {}, None
    for line in progress.__doc__.split("phase ")[1].splitlines()[1:-2]:
        begins, follows = line[4:16].strip(), line[72:].strip()
        phase = StepPhase[begins] if begins else phase
        names = follows.split(", ") if follows not in ("", "none") else []
        drawn.setdefault(phase, set()).update(StepPhase[name] for name in names)
    assert drawn == TRANSITIONS


def test_every_phase_can_be_reached_and_only_failures_end_the_pipeline():
    reached, ahead = {P.IDLE}, [P.IDLE]
    while ahead:
        new = TRANSITIONS[ahead.pop()] - reached
        reached |= new
        ahead += new
    assert reached == set(StepPhase)
    assert {phase for phase, follow in TRANSITIONS.items() if not follow} < set(FAILURES)
    assert {phase for phase, follow in TRANSITIONS.items() if P.STARTED in follow} == {P.IDLE, P.AGREED}


def test_another_transition_is_refused():
    step = StepProgress()
    step.start()
    with pytest.raises(AssertionError):
        step.agree()


def _record(pipe):
    """Return the list of the phases of this rank, which grows."""
    phases, become = [pipe._step.phase], pipe._step._become

    def record(phase):
        become(phase)
        phases.append(phase)

    pipe._step._become = record
    return phases


def _fail(pipe, kind, at):
    """Let the next step fail on this rank: before, in or after action `at`."""

    def fail(*_, **__):
        raise KeyboardInterrupt if kind == "interrupted" else ArithmeticError("no result today")

    if kind in ("raises", "interrupted"):
        act, count = pipe._executor._act, itertools.count()
        pipe._executor._act = lambda action, work: fail() if next(count) == at else act(action, work)
    elif kind == "disagrees":
        pipe._copies.require_current = fail
    elif kind == "raises after it":
        pipe._statistics.update = fail


def _run(rank, world_size, kind, seed):
    """Take drawn steps until one fails in this way; return the phases of this rank, and whether it failed here."""
    draw = random.Random(seed)  # the same on all ranks
    schedule = draw.choice(sorted(SCHEDULES))
    stages = world_size * (2 if schedule == "interleaved" else 1)
    pipe = phalanx.Pipeline(
        nn.Sequential(*(nn.Linear(3, 3) for _ in range(stages))),
        micro_batches=4,
        schedule=schedule,
        loss_fn=functional.mse_loss,
    )
    phases, x = _record(pipe), torch.ones(8, 3)
    for _ in range(2):
        pipe.step(x, target=x) if draw.random() < 0.5 else pipe(x)
        assert phases[-1] is P.AGREED
    failing, at = draw.randrange(world_size), draw.randrange(8)
    failing = 0 if kind == "refused" else failing
    everywhere = kind in ("disagrees", "raises after it")  # as errors that all ranks find together
    if rank == failing or everywhere:
        _fail(pipe, kind, at)
    with pytest.raises((ValueError, ArithmeticError, KeyboardInterrupt, phalanx.PhalanxError)):
        pipe.step(torch.ones(0, 3) if kind == "refused" else x, target=x)
    with pytest.raises(phalanx.ClosedError, match="an earlier step failed"):
        pipe.step(x, target=x)
    return phases, rank == failing


@pytest.mark.slow(but=("raises-phalanx", "interrupted-gloo"))
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@pytest.mark.parametrize("kind", ENDS)
def test_drawn_steps_go_through_the_phases_of_the_table(kind, backend, effort):
    for seed in range(effort):
        for phases, is_failing in run_ranks(_run, 2, kind, seed, backend=backend):
            assert {P.STARTED, P.ACTING, P.WAITING, P.COMPLETED, P.AGREED} <= set(phases)
            assert phases[-1] is ENDS[kind][not is_failing], (seed, phases)
            for one, other in itertools.pairwise(phases):
                assert other in TRANSITIONS[one], (seed, one, other)
