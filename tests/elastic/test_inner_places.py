"""Ranks that are killed where no hook leads: between two parameters of an update, and while a worker reads a sample."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.comparisons import assert_equal
from tests.elastic.jobs import Job, Numbers, Strike, train_job
from tests.elastic.small_agent import SmallAgent
from torch.optim import adam
from torch.utils.data import get_worker_info

from phalanx.elastic.points import AGREE, HAND_OVER, LEAVE, LOST, MEET, REBIND, RESTORE

NUM_DRAWN = 6
LATER = (LOST, LEAVE, MEET, AGREE, REBIND, HAND_OVER, RESTORE)


def draw(seed: int) -> tuple[Strike, ...]:
    """A first loss at such a place, and another in a later point of the recovery from it."""
    numbers = random.Random(seed)
    rank, place = numbers.randrange(3), ("inside update", "worker", "rank of worker")[seed % 3]
    step = numbers.randrange(8, 80) if place == "inside update" else numbers.randrange(96)
    again = Strike(numbers.choice([other for other in range(3) if other != rank]), numbers.choice(LATER), -1)
    first = Strike(-1 if "worker" in place else rank, place, step)
    return (first, again)


class _WorkerJob(Job):
    """A sample is read by whichever rank has it."""

    def strike_worker(self, sample: int) -> None:
        for number, one in enumerate(self.strikes):
            if one.step == sample and "worker" in one.place:
                try:
                    os.close(os.open(f"{self.folder}/struck-{number}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getppid() if one.place.startswith("rank") else os.getpid(), signal.SIGKILL)


def train(job: _WorkerJob) -> Any:
    read, get, calls = Numbers.__getitem__, adam._get_value, [0]  # type: ignore[attr-defined]

    def struck_read(self: Numbers, i: int) -> Any:
        if get_worker_info() is not None:
            job.strike_worker(i)
        return read(self, i)

    def struck_get(value: Any) -> Any:
        """Adam asks for the step of each parameter before it updates it."""
        calls[0] += 1
        job.strike("inside update", calls[0])
        return get(value)

    Numbers.__getitem__ = struck_read  # type: ignore[method-assign]
    adam._get_value = struck_get  # type: ignore[attr-defined]
    return train_job(job)


def make(folder: Path, strikes: tuple[Strike, ...]) -> _WorkerJob:
    folder.mkdir()
    return _WorkerJob(str(folder), strikes, samples=96, workers=1)


@pytest.mark.slow(but=("4",))
@pytest.mark.parametrize("seed", range(NUM_DRAWN))
def test_losses_inside_updates_and_workers_and_again_in_recovery_cost_no_bit(seed: int, tmp_path: Path) -> None:
    struck, quiet = make(tmp_path / "struck", draw(seed)), make(tmp_path / "quiet", ())
    ended = SmallAgent(train, 3, struck, folder=Path(struck.folder), may_raise=True).run()
    expected = SmallAgent(train, 3, quiet, folder=Path(quiet.folder)).run()
    assert os.path.exists(f"{struck.folder}/struck-0"), "the fault found no occasion"
    assert ended.generations >= 1
    for mine, theirs in zip(ended.results, expected.results, strict=True):
        assert_equal(mine["weights"], theirs["weights"])
        assert_equal(mine["random"], theirs["random"])
        assert mine["step"] == theirs["step"]
    for used in struck.samples_of_epochs():
        assert sorted(used) == list(range(96))
