"""When a Trainer saves, which checkpoints stay, and going on from the best one; also at an address."""

import re
import shutil

import pytest
import torch
from tests.on_ranks import on_ranks
from tests.small_models import make_data
from tests.trainer.trainers import make, weights
from torch.utils.data import DataLoader

from phalanx.checkpoint import CheckpointManager, inspect
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks
from phalanx.trainer import Callback, EarlyStopping, LambdaCallback
from phalanx.trainer.trainer import _KEEP

pytest_plugins = ["tests.s3"]

ACCURACIES = [0.1, 0.9, 0.5, 0.8, 0.2]


class Stop(Callback):
    """Ends a run with an error behind an epoch, when its checkpoint is there."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_begin(self, trainer):
        if trainer.epoch == self.epoch:
            trainer._manager.wait()
            raise KeyError("over")


def train(folder, *, accuracies=ACCURACIES, resume="latest", **options):
    """Six updates an epoch; what validation measures as accuracy is said by the number of the epoch."""
    where = []
    options = {"keep": None, "max_epochs": len(accuracies)} | options
    trainer = make(
        checkpoint=folder, metrics={"accuracy": lambda r, t: torch.tensor(accuracies[where[0].epoch])}, **options
    )
    where.append(trainer)
    data = make_data()
    loader, val_loader = DataLoader(data, 16, shuffle=True), DataLoader(data, 90)
    trainer.fit(loader, val_loader, resume=resume)
    return trainer


def steps_of(trainer):
    return steps_of_manager(trainer._manager)


def steps_of_manager(manager):
    return sorted(int(str(path).split("-step-")[1].split("-")[0]) for path in manager.checkpoints())


@pytest.mark.parametrize(
    ("save_every", "steps"),
    [
        (None, [6, 12, 18, 24, 30]),
        ("epoch", [6, 12, 18, 24, 30]),
        (("epochs", 2), [12, 24, 30]),
        (("epochs", 9), [30]),
        (10, [10, 20, 30]),
        (3, [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]),  # the last update of each epoch is saved once, not twice
    ],
)
def test_it_saves_by_epochs_or_by_updates_and_at_the_end(tmp_path, save_every, steps):
    assert steps_of(train(tmp_path, save_every=save_every)) == steps


@pytest.mark.parametrize("save_every", ["epoch", ("epochs", 9), 4])
def test_the_best_validations_stay_whenever_else_it_saves(tmp_path, save_every):
    trainer = train(tmp_path, save_every=save_every, keep=1, keep_best=("accuracy", "max", 2))
    assert steps_of(trainer) == [12, 24, 30]
    assert inspect(trainer.best_checkpoint).metrics["accuracy"] == pytest.approx(0.9)
    assert str(trainer.best_checkpoint).endswith("-step-12")


def test_a_resumed_run_knows_what_was_the_best(tmp_path):
    with pytest.raises(KeyError):
        train(tmp_path, save_every=("epochs", 9), keep=1, keep_best=("accuracy", "max", 1), callbacks=Stop(3))
    trainer = train(tmp_path, save_every=("epochs", 9), keep=1, keep_best=("accuracy", "max", 1))
    assert steps_of(trainer) == [12, 30]
    assert len(list(tmp_path.glob("*-step-*"))) == 2
    assert max(int(path.name[:8]) for path in tmp_path.glob("*-step-*")) == 3, "0.5 and 0.8 were no reason to save"


def test_it_goes_on_from_the_best_as_if_there_had_been_no_later_one(tmp_path):
    best = {"keep_best": ("accuracy", "max", 1)}
    path = train(tmp_path / "run", **best).best_checkpoint
    shutil.copytree(path, tmp_path / "only" / path.name)
    others = [*ACCURACIES[:2], 0.3, 0.3, 0.3]
    trainer = train(tmp_path / "run", accuracies=others, resume="best", **best)
    alone = train(tmp_path / "only", accuracies=others, **best)
    assert torch.equal(weights(trainer), weights(alone))
    assert (trainer.step, trainer.epoch) == (30, 5)
    assert steps_of(trainer)[-4:] == [24, 24, 30, 30], "the later ones of before, and those of the second way"
    assert train(tmp_path / "run", accuracies=others).step == 30


def test_what_the_launcher_starts_again_goes_on_from_the_latest(tmp_path, monkeypatch):
    """Otherwise a job that is killed again and again would go back to the best one each time."""
    options = {"keep_best": ("accuracy", "max", 1), "callbacks": Stop(4)}
    with pytest.raises(KeyError):
        train(tmp_path, **options)
    resumed = []

    class Watch(Callback):
        def on_fit_begin(self, trainer):
            resumed.append(trainer.step)

    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        with pytest.raises(KeyError):
            train(tmp_path, resume="best", **options | {"callbacks": [Watch(), Stop(4)]})
    assert resumed == [12, 24]


def test_early_stopping_watches_the_metric_of_the_best(tmp_path):
    trainer = train(tmp_path, keep_best=("accuracy", "max", 1), callbacks=EarlyStopping(patience=2))
    assert (trainer.epoch, trainer.why_stopped) == (4, "accuracy has not improved on 0.9 for 2 validations")
    own = EarlyStopping("loss", patience=2)
    train(tmp_path / "own", keep_best=("accuracy", "max", 1), callbacks=own)
    assert (own.monitor, own.mode) == ("loss", "min")
    assert EarlyStopping().monitor == "loss"


def test_all_ranks_of_a_job_keep_the_same(tmp_path):
    def work(rank, world_size):
        trainer = train(
            tmp_path, strategy="mirrored", keep=1, save_every=("epochs", 9), keep_best=("accuracy", "max", 2)
        )
        return trainer.step, trainer.best_checkpoint.name, weights(trainer)

    first, second = run_ranks(work, 2)
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])
    assert len(list(tmp_path.glob("*-step-*"))) == 3
    assert first[1].startswith("00000002-step-")


def test_what_makes_no_sense_is_said(tmp_path):
    for options, words in (
        ({"save_every": "day"}, "save_every must be 1 or more updates, 'epoch', or epochs as in"),
        ({"save_every": ("epochs", 0)}, "save_every must be 1 or more"),
        ({"save_every": True}, "save_every must be 1 or more"),
        ({"keep_best": "accuracy"}, "keep_best must be \\(metric, 'min' or 'max', count\\)"),
        ({"keep_best": ("accuracy", "max", 2), "checkpoint": None}, "keep_best needs checkpoint"),
        ({"save_every": "epoch", "checkpoint": None}, "save_every needs checkpoint"),
    ):
        with pytest.raises(ValueError, match=words):
            make(**{"checkpoint": tmp_path} | options)
    trainer = make(checkpoint=tmp_path, keep_best=("accuracy", "max", 1))
    loader = DataLoader(make_data(), 16)
    with pytest.raises(ValueError, match="keep_best uses 'accuracy' of the validation: give a val_loader"):
        trainer.fit(loader)
    with pytest.raises(ValueError, match=r"keep_best: 'accuracy' is not a metric of the validation: \['loss'\]"):
        trainer.fit(loader, loader)
    with pytest.raises(ValueError, match="resume must be 'latest' or 'best', got 'newest'"):
        make().fit(loader, resume="newest")
    with pytest.raises(ValueError, match="resume='best': there is no checkpoint yet"):
        make(checkpoint=tmp_path / "new", keep_best=("loss", "min", 1)).fit(loader, loader, resume="best")
    with pytest.raises(ValueError, match="the manager has no metric to choose the best"):
        make(checkpoint=tmp_path / "new").fit(loader, loader, resume="best")


@pytest.mark.slow
def test_a_run_at_an_address_ends_with_the_bits_of_one_that_never_ended(s3, tmp_path):
    folder = s3.new_folder()
    best = {"keep_best": ("accuracy", "max", 2), "keep": 1}

    def begin(rank, world_size):
        with pytest.raises(KeyError):
            train(folder, strategy="mirrored", callbacks=Stop(3), **best)

    def go_on(rank, world_size):
        trainer = train(folder, strategy="mirrored", **best)
        return weights(trainer), trainer.best_checkpoint, steps_of(trainer)

    run_ranks(begin, 2)
    (found, path, steps), _ = run_ranks(go_on, 2)
    straight = run_ranks(lambda rank, world_size: weights(train(tmp_path, strategy="mirrored", **best)), 2)
    assert torch.equal(found, straight[0])
    assert path.startswith(f"{folder}/00000002-step-")
    assert len(steps) == 3


@pytest.mark.parametrize("max_failures", [1, 2])
def test_a_training_outlives_as_many_failed_saves_in_a_row_as_its_manager_allows(tmp_path, max_failures):
    """One failed save on a full disk ended a training of ten hours."""
    manager = CheckpointManager(tmp_path, keep=None, max_failures=max_failures)
    for number, step in ((2, 6), (2, 9)):  # two in a row, by the files that are where the folders should be
        (tmp_path / f"{number:08d}-step-{step}").write_text("in the way")
    if max_failures == 1:
        with pytest.raises(CheckpointError, match=r"step 9 to .*Not a directory.* 2 saves in a row have failed"):
            train(manager, keep=_KEEP, save_every=3)
        assert steps_of_manager(manager) == [3]
    else:
        trainer = train(manager, keep=_KEEP, save_every=3)
        assert trainer.step == 30
        assert steps_of(trainer) == [3, 12, 15, 18, 21, 24, 27, 30]


def test_the_options_of_a_manager_are_not_given_twice(tmp_path):
    manager = CheckpointManager(tmp_path, keep_best=("accuracy", "max", 1))
    for options in ({"keep": 5}, {"keep": _KEEP, "keep_best": ("accuracy", "max", 1)}):
        with pytest.raises(ValueError, match="pass keep and keep_best to the CheckpointManager"):
            train(manager, **options)
    assert str(train(manager, keep=_KEEP).best_checkpoint).endswith("-step-12")


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [False, True])
@on_ranks(2)
def test_a_bucket_that_is_not_there_is_reported_before_the_first_step(s3, dry_run):
    """It was reported after the whole first epoch, and not at all by a dry run."""

    def count_steps(folder, steps):
        counted = LambdaCallback(on_step_end=lambda trainer, loss: steps.append(trainer.step))
        train(folder, strategy="mirrored", accuracies=ACCURACIES[:1], callbacks=counted, dry_run=dry_run)

    steps = []
    with pytest.raises(ValueError) as caught:
        count_steps("s3://nowhere/runs", steps)
    assert steps == []
    count_steps("s3://runs/there", steps)
    assert steps == list(range(1, 3 if dry_run else 7))
    words = str(caught.value)
    assert re.search(r"checkpoint='s3://nowhere/runs' can't be written to: .*exist.*\. Create the bucket", words)


def test_a_run_continues_with_more_data_after_an_epoch_and_not_inside_one(tmp_path):
    """Both were refused, and the message advised set_epoch of a sampler that a Trainer's user does not have."""

    def fit(folder, count, **options):
        trainer = make(checkpoint=tmp_path / folder, **options)
        trainer.fit(DataLoader(make_data(count), 16))
        return trainer

    fit("end", 32, max_epochs=1)
    assert fit("end", 64, max_epochs=2).step == 2 + 4
    fit("inside", 64, max_epochs=1, max_steps=1)
    with pytest.raises(CheckpointError) as caught:
        fit("inside", 32, max_epochs=1)
    assert (
        "-step-1: the checkpoint is inside epoch 1 over 64 samples, but loader has 32. Pass the same data to finish "
        "that epoch, or train in another folder.\n"
    ) in str(caught.value)
