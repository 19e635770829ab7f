"""Programs drawn at random lose ranks at random moments, and hold what an undisturbed run holds: everything.

By hand, thousands: `pytest tests/elastic/test_generated_programs.py --programs 2000 --first-program 0`.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.elastic.jobs import Job, Strike
from tests.elastic.programs import LAYERS, LOOPS, MORE, OPTIMIZERS, Program, differences, train_program
from tests.elastic.small_agent import LEAVES, Ended, SmallAgent

_PLACES = ("batch", "forward", "backward", "update", "updated", "commit")
_PLACES_OF = {"adamw": ("inside",), "zero": ("inside", "done", "done")}
_POINTS = ("lost", "leave", "meet", "agree", "rebind", "hand over", "restore")
_SHARES = 6  # of the programs, for as many tests: workers of pytest share them


def draw_program(draw: random.Random) -> Program:
    """Some layers, some of what a loop can do."""
    layers = tuple(draw.sample(LAYERS, draw.randint(0, 4)))
    does = [*draw.sample(LOOPS, draw.randint(0, 3)), *draw.sample(MORE, draw.randint(0, 2))]
    optimizer = draw.choice(sorted(OPTIMIZERS))
    wrapper = draw.choice(("phalanx", "phalanx", "torch"))
    if optimizer == "zero":
        does = [one for one in does if one not in ("new group", "second")]
        wrapper = "phalanx"
    if wrapper == "torch":  # which broadcasts buffers, and so keeps them of one form
        layers = tuple(layer for layer in layers if layer in ("norm", "extra", "attribute", "generator"))
    if {"late", "growing", "none first", "retyped", "expanded"} & set(
        layers
    ):  # an average can't follow these, lost ranks or none
        does = [one for one in does if not one.startswith("average")]
    trial = 100 if "late reduce" in does else draw.choice((2, 100))  # in which it is learned that a loop does so
    return Program(layers, tuple(does), optimizer, wrapper, draw.choice((0.0, 0.2)), trial=trial)


def draw_strikes(draw: random.Random, program: Program, world_size: int) -> tuple[Strike, ...]:
    """One loss, or two; of one rank or of two at once; or again while the others recover."""
    num_steps = 4 if "accumulate" in program.does else 8
    places = [*_PLACES, *(_PLACES_OF.get(program.optimizer, ()))]
    places += [place for one, place in (("late reduce", "late"), ("validation", "validation")) if one in program.does]

    def draw_one(rank: int) -> Strike:
        place = draw.choice(places)
        step = {"late": 3, "validation": num_steps // 2}.get(place)
        return Strike(rank, place, draw.randrange(num_steps) if step is None else step)

    first = draw_one(draw.randrange(world_size))
    kind = draw.choice(("one", "two", "together", "recovering"))
    if kind == "two":
        return first, draw_one(first.rank)  # two others at once may be all who hold the state
    if kind == "together" and world_size >= 3:
        return first, dataclasses.replace(first, rank=(first.rank + 1) % world_size)
    if kind == "recovering" and world_size >= 3:
        return first, Strike((first.rank + 1) % world_size, draw.choice(_POINTS), -1)
    return (first,)


@dataclass(frozen=True)
class Change:
    """From step `step` on there are `add` ranks more, or, where that is -1, one fewer: rank `leaves`."""

    step: int
    add: int
    leaves: int = -1


def draw_change(draw: random.Random, program: Program, world_size: int) -> Change:
    """Other ranks at any step but the first: one or two more, or one fewer."""
    step = draw.randrange(1, 4 if "accumulate" in program.does else 8)
    if world_size > 2 and draw.random() < 0.5:
        return Change(step, -1, draw.randrange(world_size))
    return Change(step, draw.choice((1, 1, 2)))


def makes_batch_of_one(world_size: int, change: Change) -> bool:
    """Return whether a rank may get a batch of one sample after the change, which PyTorch's BatchNorm refuses."""
    rests = [16 * world_size - 4 * world_size * steps for steps in range(4)]
    return any(-(-rest // (world_size + change.add)) % 4 == 1 for rest in rests)


def goes_with(strike: Strike, change: Change) -> bool:
    """Return whether who is lost in `strike` is lost apart from `change`.

    The ranks that are there wait in the change's step for those that come, and would not hear of a loss. Who comes has
    what rank 0 has for itself: if that one is lost while it hands over, it is another's. And of two ranks that are lost
    where one is replaced, the replacement may be either.
    """
    if strike.step == -1:
        return change.add > 0 and strike.rank != 0
    return strike.step not in (change.step - 1, change.step)


def run_one(job: Job, program: Program, world_size: int, change: Change | None) -> Ended:
    """Run the program with what befalls it; all ranks of the change come, and go, at the same step."""
    os.makedirs(job.folder)
    folder = Path(job.folder)
    if change is not None and change.add < 0:
        leaves = Strike(change.leaves, "batch", change.step, LEAVES)
        job = dataclasses.replace(job, strikes=(*job.strikes, leaves))
    elif change is not None:
        job = dataclasses.replace(job, wait_at=change.step)

    def let_come(agent: SmallAgent) -> None:
        if change is None or (folder / "come").exists():
            return
        if all((folder / f"waits-{seat.process.pid}").exists() for seat in agent.seats.values()):
            agent.regroup(add=change.add)
            time.sleep(0.1)  # a rank looks every 20 ms whether somebody comes
            (folder / "come").touch()

    return SmallAgent(train_program, world_size, job, program, folder=folder, on_turn=let_come).run()


def compare_with_quiet(job: Job, run: Callable[[Job], Ended], drawn: str) -> None:
    """Run the job with its losses and without, and compare all that each rank holds; `drawn` says what is run."""
    quiet = dataclasses.replace(job, folder=str(Path(job.folder).with_name("quiet")), strikes=())
    ends = []
    for one in (job, quiet):
        try:
            ends.append(run(one))
        except Exception as error:
            raise AssertionError(f"{drawn}, {one.strikes}") from error
    for rank, (mine, theirs) in enumerate(zip(ends[0].results, ends[1].results, strict=True)):
        different = differences(mine, theirs)
        assert not different, f"{drawn}, {job.strikes}, rank {rank}: {different}"


def run_drawn(seed: int, folder: Path, *, changes: bool = False) -> None:
    """Run the program of `seed`, disturbed and not, and compare all that each rank holds."""
    draw = random.Random(seed)
    program, world_size = draw_program(draw), draw.choice((2, 2, 2, 3, 3, 4))
    strikes = draw_strikes(draw, program, world_size)
    change = draw_change(draw, program, world_size) if changes else None
    if change is not None:
        strikes = tuple(strike for strike in strikes if goes_with(strike, change))
        if makes_batch_of_one(world_size, change):
            layers = tuple(layer for layer in program.layers if layer != "norm")
            program = dataclasses.replace(program, layers=layers)
    job = Job(str(folder / "lost"), strikes, samples=16 * world_size)
    compare_with_quiet(job, lambda one: run_one(one, program, world_size, change), f"seed {seed}: {program}, {change}")


@pytest.mark.slow
@pytest.mark.parametrize("share", range(_SHARES))
def test_a_program_that_is_drawn_at_random_loses_ranks_and_no_bit(
    share: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    first = pytestconfig.getoption("--first-program")
    for seed in range(first + share, first + pytestconfig.getoption("--programs"), _SHARES):
        run_drawn(seed, tmp_path / str(seed))


@pytest.mark.slow
@pytest.mark.parametrize("share", range(_SHARES // 2))
def test_a_program_that_grows_or_shrinks_loses_ranks_and_no_bit(
    share: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The undisturbed program grows and shrinks at the same step."""
    first = pytestconfig.getoption("--first-program")
    for seed in range(first + share, first + pytestconfig.getoption("--programs") // 3, _SHARES // 2):
        run_drawn(seed, tmp_path / str(seed), changes=True)
