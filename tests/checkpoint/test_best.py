"""The best checkpoints by a metric stay beside the newest, in a folder and at an address."""

import math
import random

import pytest
from click.testing import CliRunner
from tests.logs import logged
from tests.on_ranks import on_ranks

from phalanx.checkpoint import CheckpointManager, inspect
from phalanx.checkpoint.best import Best
from phalanx.cli.commands import group
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

VALUES = [0.1, 0.9, 0.5, math.nan, 0.9, 0.2, 0.3]


def steps_of(manager):
    return sorted(int(str(path).split("-step-")[1].split("-")[0]) for path in manager.checkpoints())


@pytest.mark.parametrize("place", ["folder", "address"])
@pytest.mark.parametrize(("mode", "stay", "best"), [("max", {1, 4}, 1), ("min", {0, 5}, 0)])
def test_the_best_and_the_newest_stay(tmp_path, place, mode, stay, best):
    def work(rank, world_size):
        folder = tmp_path / "run" if place == "folder" else "memory://runs/best"
        manager = CheckpointManager(folder, keep=1, keep_best=("accuracy", mode, 2))
        for step, value in enumerate(VALUES):
            manager.save(step, {"step": step}, metrics={"accuracy": value, "other": 1.0})
        manager.save(9, {"step": 9})  # of which nothing was measured
        restored = manager.load(best=True)
        assert restored.path == manager.best()
        assert manager.load().step == 9
        return steps_of(manager), restored.step, restored.state["step"]

    steps, step, value = run_ranks(work, 1, backend=None)[0]
    assert steps == sorted({*stay, 9})
    assert step == value == best, "of equal ones it is the first"


def test_what_was_measured_is_shown(tmp_path):
    path = CheckpointManager(tmp_path).save(1, {"a": 1}, metrics={"accuracy": 0.75, "loss": math.inf})
    assert inspect(path).metrics == {"accuracy": 0.75}
    assert "accuracy 0.75" in CliRunner().invoke(group, ["checkpoint", "inspect", str(path)]).output


@on_ranks(2)
def test_all_ranks_load_the_best_that_is_whole(rank, tmp_path):
    manager = CheckpointManager(tmp_path / "run", keep=1, keep_best=("accuracy", "max", 2))
    for step, value in enumerate([0.5, 0.9, 0.1]):
        manager.async_save(step, {"step": step}, metrics={"accuracy": value} if rank == 0 else {"accuracy": 0.0})
    manager.wait()
    found = [manager.load(best=True).step]
    if rank == 0:
        file = manager.best() / "state.pt"
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="Loading the previous one, 00000001-step-0"):
        found.append(manager.load(best=True, fallback=True).step)
    assert found == [1, 0]


def test_that_there_is_no_best_is_said(tmp_path):
    manager = CheckpointManager(tmp_path, keep_best=("accuracy", "max", 2))
    assert (manager.best(), manager.load(best=True)) == (None, None)
    manager.save(3, {"a": 1}, metrics={"loss": 1.0})
    with pytest.raises(CheckpointError, match=r"was saved with the metric 'accuracy'; available steps: 3\."):
        manager.load(best=True)
    with pytest.raises(
        ValueError, match=r"CheckpointManager.load: the manager has no metric to choose the best checkpoint; create"
    ):
        CheckpointManager(tmp_path).load(best=True)


def test_metrics_without_that_of_keep_best_are_a_warning_once(tmp_path):
    """They were saved without a word: no checkpoint was the best, and the best ones were removed as outdated."""
    manager = CheckpointManager(tmp_path, keep_best=("accuracy", "max", 2))
    with logged() as lines:
        manager.save(1, {"a": 1}, metrics={"accuracy": math.nan})
        assert lines == []
        for step in (2, 3):
            manager.save(step, {"a": 1}, metrics={"acc": 0.5, "f1": 1.0})
    [line] = lines
    assert "metrics has 'acc', 'f1', but not 'accuracy', the metric of keep_best" in line
    assert manager.best() is None


@pytest.mark.parametrize(
    "wrong", ["accuracy", ("accuracy", "max"), ("accuracy", "up", 3), ("a", "max", 0), ("", "max", 1)]
)
def test_what_makes_no_sense_is_an_error(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"CheckpointManager: keep_best must be \(metric, 'min' or 'max', count\)"):
        CheckpointManager(tmp_path, keep_best=wrong)


def test_values_one_by_one_come_to_the_same_as_all_at_once():
    dice = random.Random(28)
    for _ in range(200):
        best = Best("x", dice.choice(["min", "max"]), dice.randint(1, 4))
        values = [dice.choice([0.0, 0.5, 1.0, math.nan]) for _ in range(dice.randint(0, 8))]
        kept: tuple[float, ...] = ()
        for number, value in enumerate(values):
            kept, is_among = best.add(kept, value)
            before = [one for one in values[:number] if not math.isnan(one)]
            beaten = sum(one >= value if best.mode == "max" else one <= value for one in before)
            assert is_among == (not math.isnan(value) and beaten < best.count)
        assert list(kept) == [values[number] for number in best.order(range(len(values)), values.__getitem__)]
