"""What a fit says on rank 0, and what it refuses before it begins."""

import contextlib
import io
import math
import re

import pytest
import torch
from tests.small_models import make_data
from tests.trainer.trainers import make, make_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import phalanx
from phalanx import strategies
from phalanx.testing import run_ranks
from phalanx.trainer import EarlyStopping, LambdaCallback, progress
from phalanx.trainer.fit_display import RunningMean


def fit(trainer, size=64):
    trainer.fit(DataLoader(make_data(size), 16), DataLoader(make_data(8), 4))
    return trainer


def shown(**options):
    """The lines of a fit."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fit(make(show_progress=True, **options))
    return out.getvalue().splitlines()


def test_ranks_refuse_a_folder_that_cannot_be_made_at_once_and_only_the_first_one_speaks(tmp_path):
    """A checkpoint's folder was made by the first save, after an epoch, and log_dir's error was rank 0's alone."""
    (tmp_path / "file").touch()

    def train(rank, world_size):
        said = []
        with contextlib.redirect_stdout(io.StringIO()) as out:
            for options in (
                {"checkpoint": tmp_path / "file" / "a"},
                {"log_dir": tmp_path / "file"},
                {"checkpoint": tmp_path / "file", "log_dir": tmp_path / "file" / "b"},
            ):
                trainer = make(strategy=strategies.get("mirrored"), show_progress=True, **options)
                with pytest.raises(ValueError, match=r"Trainer\.fit: ") as refused:
                    fit(trainer)
                said.append((trainer.step, str(refused.value)))
            for epochs in (1, 2):
                trainer = make(strategy=strategies.get("mirrored"), show_progress=True, max_epochs=epochs)
                trainer.fit(DataLoader(make_data(64), 16), DataLoader(make_data(8), 4))
        return said, out.getvalue()

    (first, lines), (second, nothing) = run_ranks(train, 2)
    assert first == second
    assert [step for step, _ in first] == [0, 0, 0]
    assert re.search(r"checkpoint='.*/file/a' can't be created: Not a directory", first[0][1])
    assert re.search(r"log_dir='.*/file' is a file", first[1][1])
    assert re.search(r"checkpoint='.*file' is a file.*log_dir='.*b' can't be created", first[2][1])
    assert len(lines.splitlines()) == 6
    assert "resumes" not in lines
    assert nothing == ""


def test_it_says_where_it_goes_on_why_it_ends_and_that_a_finished_run_has_nothing_to_do(tmp_path):
    """All three looked like a run that trains to its end: there was no line."""
    lines = shown(checkpoint=tmp_path, max_epochs=2, max_steps=6)
    assert re.fullmatch(r"epoch 1/2: 64 samples in .* samples/s, mean loss [\d.]+", lines[0])
    assert re.fullmatch(r"epoch 1/2: validation: loss [\d.]+", lines[1])
    assert lines[2].startswith("epoch 2/2: 32 samples")
    assert lines[4:] == ["stopped after step 6, 1 of 2 epochs: max_steps=6"]
    lines = shown(checkpoint=tmp_path, max_epochs=2, max_steps=6)
    advice = "nothing to train; raise max_steps, or pass another folder"
    assert lines[1:] == [f"{tmp_path} has a finished run (max_steps=6): {advice}"]
    lines = shown(checkpoint=tmp_path, max_epochs=2)
    assert re.fullmatch(rf"resumes from {tmp_path}/\S+, after step 6, in epoch 2", lines[0])
    assert len(lines) == 3
    lines = shown(checkpoint=tmp_path, max_epochs=2)
    assert len(lines) == 2
    assert lines[1].endswith(
        "has a finished run (max_epochs=2): nothing to train; raise max_epochs, or pass another folder"
    )
    stopping = EarlyStopping(patience=1, min_delta=1e9)
    assert re.fullmatch(
        r"stopped after step 8, 2 of 9 epochs: loss has not improved on .* for 1 validations",
        shown(max_epochs=9, callbacks=stopping)[-1],
    )


def test_the_line_of_an_epoch_shows_the_mean_of_its_losses():
    """It was the loss of one batch, which jumps."""
    losses = []
    note = LambdaCallback(on_step_end=lambda trainer, loss: losses.append(float(loss)))
    line = shown(callbacks=note)[0]
    assert float(line.split()[-1]) == pytest.approx(sum(losses) / 4, rel=1e-3)
    assert math.isnan(float(RunningMean()))


def test_an_epoch_that_is_left_counts_the_batch_at_hand():
    """A dry run said that it had trained on 32 samples of 64, one behind max_steps that it had used one batch less."""
    assert shown(dry_run=True)[0].startswith("epoch 1/1: 32 samples in")
    assert shown(max_steps=3)[0].startswith("epoch 1/1: 48 samples in")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for ends in (False, True):
            bar = progress([torch.zeros(4)] * 3)
            for _ in bar:
                if ends:
                    bar.end()
                break
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["0", "4"]


def test_an_interrupted_run_says_from_where_the_same_command_goes_on(tmp_path):
    def interrupt(trainer, loss):
        if trainer.step == 3:
            raise KeyboardInterrupt

    for options, words in (
        ({}, "there is no checkpoint"),
        (
            {"checkpoint": tmp_path, "save_every": 2},
            "the last checkpoint is from step 2: the same command resumes there",
        ),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(KeyboardInterrupt):
            fit(make(show_progress=True, callbacks=LambdaCallback(on_step_end=interrupt), **options))
        assert out.getvalue().splitlines()[-1] == f"stopped at step 3; {words}"


def test_a_loss_that_is_no_number_is_told_once(caplog):
    factors = iter([1.0, 1.0, *[math.nan] * 9])
    model = make_model()
    trainer = phalanx.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda result, target: F.mse_loss(result, target) * next(factors),
        strategy="single_device",
        max_epochs=2,
        show_progress=False,
    )
    trainer.fit(DataLoader(make_data(64), 16))
    (record,) = [one for one in caplog.records if "the loss is nan" in one.getMessage()]
    assert "Trainer: the loss is nan at step 3: lower the learning rate" in record.getMessage()


class Numbers(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@pytest.mark.slow(but=("2-46-sampler", "2-46-iterable", "2-46-several"))
@pytest.mark.parametrize("kind", ["sampler", "iterable", "several"])
@pytest.mark.parametrize(("ranks", "total"), [(1, 33), (2, 33), (2, 46), (3, 35)])
def test_the_line_of_an_epoch_counts_the_samples_that_forward_received(tmp_path, kind, ranks, total):
    """330 samples in batches of 32 were "352 samples"; skipped samples of a resumed run counted as well."""

    class Counting(nn.Linear):
        seen = 0

        def forward(self, x):
            Counting.seen += len(x)
            return super().forward(x)

        def training_step(self, batch):
            x, y = batch["one"] if isinstance(batch, dict) else batch
            return F.mse_loss(self(x), y)

    def train(rank, world_size):
        told = []
        data = TensorDataset(torch.randn(total, 4), torch.randn(total, 1))
        for steps in (1, 99):
            model = Counting(4, 1)
            loader = DataLoader(Numbers(data) if kind == "iterable" else data, 12)
            options = {"max_steps": steps, "checkpoint": tmp_path, "strategy": strategies.get("mirrored")}
            trainer = phalanx.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
            Counting.seen = 0
            with contextlib.redirect_stdout(io.StringIO()) as out:
                trainer.fit({"one": loader} if kind == "several" else loader)
            told.append((Counting.seen, re.findall(r"epoch 1/1: (\d+) samples", out.getvalue())))
        return told

    told = run_ranks(train, ranks)
    for number in range(2):
        seen = sum(of_rank[number][0] for of_rank in told)
        assert told[0][number][1] == [str(seen)]
