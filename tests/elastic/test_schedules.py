"""Random schedules of kills: the samples of each epoch, and the bits, are those of a run that nobody disturbed.

By hand: pytest tests/elastic/test_schedules.py --elastic-kills 1000 --timeout 0
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Strike, train_apart, train_job
from tests.elastic.small_agent import SmallAgent

IN_STEP = ["batch", "forward", "backward", "update", "updated", "commit"]
IN_ROUND = ["batch", "1 called", "1 left", "2 called", "2 left"]
IN_RECOVERY = ["lost", "leave", "meet", "agree", "rebind", "hand over", "restore"]
NUM_STEPS = 16
APART = ["DiLoCo", "LocalSGD"]


def random_strikes(numbers: random.Random, world_size: int, most: int) -> tuple[Strike, ...]:
    """Up to `most` kills, never of all ranks at once: rank 0 is left alone, or it alone is killed."""
    victims = [0] if numbers.random() < 0.3 else list(range(1, world_size))
    strikes = []
    for _ in range(numbers.randint(1, most)):
        rank = numbers.choice(victims)
        if strikes and numbers.random() < 0.4:
            strikes.append(Strike(rank, numbers.choice(IN_RECOVERY), -1))
        else:
            strikes.append(Strike(rank, numbers.choice(IN_STEP), numbers.randrange(NUM_STEPS)))
    return tuple(strikes)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "zero"])
def test_a_random_schedule_of_kills_costs_no_sample_and_no_bit(
    optimizer: str, num_elastic_kills: int, tmp_path: Path
) -> None:
    world_size = 3

    def run_job(name: str, strikes: tuple[Strike, ...]) -> tuple[Job, list[dict[str, torch.Tensor]]]:
        folder = tmp_path / name
        folder.mkdir()
        job = Job(str(folder), strikes, samples=96, optimizer=optimizer, amp=True, scheduler=True)
        ended = SmallAgent(train_job, world_size, job, folder=folder, most_losses=50).run()
        return job, [one["weights"] for one in ended.results]

    _, expected = run_job("undisturbed", ())
    kills = seed = 0
    while kills < num_elastic_kills // 2:
        seed += 1
        strikes = random_strikes(
            random.Random(f"{optimizer} {seed}"), world_size, min(4, num_elastic_kills // 2 - kills)
        )
        job, weights = run_job(f"schedule-{seed}", strikes)
        kills += len(strikes)
        for mine, theirs in zip(weights, expected, strict=True):
            assert_equal(mine, theirs, seed, strikes)
        assert [sorted(used) for used in job.samples_of_epochs()] == [list(range(96))] * 2, (seed, strikes)


def test_a_random_schedule_of_kills_leaves_those_that_train_apart_with_the_same_bits_at_the_end(
    num_elastic_kills: int, tmp_path: Path
) -> None:
    """`train_apart` sees to it that a torn round has changed no parameter of a survivor."""
    for seed in range(max(1, num_elastic_kills // 6)):
        kind = APART[seed % len(APART)]
        draw = random.Random(f"{kind} {seed}")
        world_size = draw.choice([2, 3, 4, 5])
        num_steps, every = 2 * -(-128 // (4 * world_size)), 4
        victims = [0] if draw.random() < 0.3 else list(range(1, world_size))
        strikes = []
        for _ in range(draw.randint(1, 3)):
            rank, place, step = draw.choice(victims), draw.choice(IN_ROUND), draw.randrange(num_steps)
            if place != "batch":  # in the round behind it, the last one of which is that of `finish`
                step = draw.choice([*range(every - 1, num_steps, every), num_steps])
            if strikes and draw.random() < 0.3:
                place, step = draw.choice([*IN_RECOVERY, "finish"]), -1
            strikes.append(Strike(rank, place, step))
        folder = tmp_path / f"{kind}-{seed}"
        folder.mkdir()
        job = Job(str(folder), tuple(strikes), samples=128)
        ended = SmallAgent(train_apart, world_size, job, kind, folder=folder).run()
        first, *others = (one["weights"] for one in ended.results)
        for other in others:
            assert_equal(other, first, seed, job)
        assert all(torch.isfinite(value).all() for value in first.values()), (seed, job)
        assert len({one["step"] for one in ended.results}) == 1, (seed, job)
