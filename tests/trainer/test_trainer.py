"""Trainer: the bare loop's result, exact resumption, exact validation, and every point of a fit."""

import copy
import os
import random

import pytest
import torch
from tests.on_ranks import on_ranks
from tests.small_models import make_data
from tests.trainer.trainers import WithSteps, make, make_model, weights
from tests.training import train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import phalanx
from phalanx import strategies
from phalanx.errors import CheckpointError
from phalanx.trainer import Callback, EarlyStopping, LambdaCallback
from phalanx.trainer.metrics import Sums


def test_samples_that_are_batches_already_are_taken_as_they_are():
    """A loader without automatic batching has no batch_sampler, and fit ended with an AttributeError."""
    batches = [(torch.randn(4, 6), torch.randn(4, 1)) for _ in range(5)]
    trainer = make()
    trainer.fit(DataLoader(batches, batch_size=None, sampler=phalanx.DistributedSampler(batches, 1, 0)))
    assert trainer.step == 5


def test_it_does_what_the_loop_by_hand_does():
    trainer = make(max_epochs=3, max_norm=1.0, accumulate=2, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    trainer.fit(DataLoader(make_data(), 16, shuffle=True))

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = strategies.SingleDeviceStrategy("cpu").loader(make_data(), 16)
    for _ in range(3):
        batches = list(loader)  # six: three updates of two
        for pair in zip(batches[::2], batches[1::2], strict=True):
            together = sum(len(inputs) for inputs, _ in pair)  # 32, and 26 at the end
            for inputs, targets in pair:
                (F.mse_loss(model(inputs), targets) * (len(inputs) / together)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    assert torch.equal(weights(trainer), torch.cat([one.flatten() for one in model.state_dict().values()]))
    assert (trainer.epoch, trainer.step) == (3, 9)


def test_accumulated_batches_weigh_by_their_samples():
    """A short last batch had the weight of a whole one; the update is that of one batch with all of their samples."""
    for seed in range(12):
        draw = random.Random(seed)
        size, batch, accumulate = draw.randint(1, 24), draw.randint(1, 6), draw.randint(1, 4)
        data = make_data(size)
        torch.manual_seed(seed)
        model = nn.Linear(6, 1)
        plain = copy.deepcopy(model)
        loader = strategies.SingleDeviceStrategy("cpu").loader(data, batch, shuffle=False)
        trainer = phalanx.Trainer(
            model, lambda p: torch.optim.SGD(p, lr=0.1), F.mse_loss, accumulate=accumulate, show_progress=False,
            strategy=strategies.SingleDeviceStrategy("cpu"),
        )  # fmt: skip
        trainer.fit(loader)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        inputs, targets = data.tensors
        together = batch * accumulate
        batches = zip(inputs.split(together), targets.split(together), strict=True)
        expected, case = train(plain, optimizer, batches, F.mse_loss), (size, batch, accumulate)
        torch.testing.assert_close(list(model.parameters()), expected, msg=lambda m, case=case: f"{case}: {m}")


class Stop(Exception):
    pass


@pytest.mark.slow(but=("1-1", "6-2", "7-1"))
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("end", [1, 4, 6, 7, 11])
def test_a_run_that_was_ended_anywhere_goes_on_to_the_same_bits(tmp_path, end, accumulate):
    def run(folder, callbacks=(), **options):
        trainer = make(
            make_model(dropout=0.3),
            max_epochs=3,
            seed=4,
            checkpoint=folder,
            save_every=2,
            accumulate=accumulate,
            scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
            scheduler_interval="step",
            callbacks=callbacks,
            **options,
        )
        trainer.fit(DataLoader(make_data(), 8 if accumulate == 2 else 16, shuffle=True))
        return trainer

    def stop(trainer, loss):
        if trainer.step == end:
            raise Stop

    whole = run(tmp_path / "whole")
    with pytest.raises(Stop):
        run(tmp_path / "ended", [LambdaCallback(on_step_end=stop)])
    assert torch.equal(weights(run(tmp_path / "ended")), weights(whole))
    run(tmp_path / "limited", max_steps=end)
    again = run(tmp_path / "limited")
    assert torch.equal(weights(again), weights(whole))
    assert (again.epoch, again.step) == (whole.epoch, whole.step) == (3, 18)
    finished = run(tmp_path / "limited")  # nothing is left to do
    assert finished.step == 18


@on_ranks(3)
def test_a_validation_is_exact_on_ranks_that_have_nothing_and_where_ranks_evaluate_together(rank, world_size):
    found = []
    for name, options in (("mirrored", {}), ("sharded", {"shard": "model"}), ("pipeline", {"micro_batches": 3})):
        model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        torch.manual_seed(0)
        for one in model.parameters():
            nn.init.normal_(one)
        with torch.no_grad():
            alone = [F.mse_loss(model(x), y).item() for x, y in (make_data(size).tensors for size in (1, 7))]
        trainer = make(model, strategy=strategies.get(name, **options))
        sizes = [trainer.validate(DataLoader(make_data(size), 3 * world_size))["loss"] for size in (1, 7)]
        found.append((sizes, alone))
    rank = found
    for found, alone in rank:
        assert found == pytest.approx(alone)


class Recorder(Callback):
    def __init__(self, points):
        self.points = points

    def on_fit_begin(self, trainer):
        self.points.append("fit")

    def on_epoch_begin(self, trainer):
        self.points.append(f"epoch {trainer.epoch}")

    def on_step_end(self, trainer, loss):
        assert loss.shape == ()
        self.points.append(trainer.step)

    def on_checkpoint(self, trainer):
        self.points.append(f"saved {trainer.step}")

    def on_validation_end(self, trainer, metrics):
        self.points.append(sorted(metrics))

    def on_epoch_end(self, trainer):
        self.points.append("end of epoch")

    def on_fit_end(self, trainer):
        self.points.append("end")

    def on_error(self, trainer, error):
        self.points.append(type(error).__name__)


def test_callbacks_are_called_at_every_point_in_order(tmp_path):
    points = []
    trainer = make(max_epochs=2, checkpoint=tmp_path, callbacks=[Recorder(points)])
    trainer.fit(DataLoader(make_data(32), 16), DataLoader(make_data(8), 4))
    one = ["epoch 0", 1, 2, ["loss"], "end of epoch"]
    two = ["saved 2", "epoch 1", 3, 4, ["loss"], "end of epoch"]
    assert points == ["fit", *one, *two, "saved 4", "end"]
    assert set(dir(LambdaCallback)) >= {name for name in dir(Callback) if name.startswith("on_")}
    points.clear()
    fail = LambdaCallback(on_step_end=lambda trainer, loss: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(callbacks=[Recorder(points), fail]).fit(DataLoader(make_data(32), 16))
    assert points == ["fit", "epoch 0", 1, "ZeroDivisionError"]
    with pytest.raises(ValueError, match="Callback has no method 'on_step'"):
        LambdaCallback(on_step=print)


def test_it_stops_early_where_nothing_gets_better_and_says_why():
    stopping = EarlyStopping("loss", patience=2, min_delta=1e9)
    trainer = make(max_epochs=9, callbacks=[stopping])
    trainer.fit(DataLoader(make_data(32), 16), DataLoader(make_data(8), 4))
    assert trainer.epoch == 3
    assert "loss has not improved on" in trainer.why_stopped
    with pytest.raises(ValueError, match=r"EarlyStopping: 'accuracy' is not a metric of the validation: \['loss'\]"):
        make(callbacks=[EarlyStopping("accuracy")]).fit(DataLoader(make_data(32), 16), DataLoader(make_data(8), 4))
    for wrong, words in (({"mode": "up"}, "mode must be"), ({"patience": 0}, "patience must be 1 or more")):
        with pytest.raises(ValueError, match=words):
            EarlyStopping("loss", **wrong)


def test_a_run_that_stopped_early_has_stopped_when_it_is_started_again(tmp_path):
    """It trained one more epoch each time."""
    for _ in range(3):
        trainer = make(max_epochs=9, checkpoint=tmp_path, callbacks=[EarlyStopping(patience=2, min_delta=1e9)])
        trainer.fit(DataLoader(make_data(32), 16), DataLoader(make_data(8), 4))
        assert (trainer.epoch, trainer.step) == (3, 6)


def test_a_validation_is_measured_in_full_precision():
    """Loss and metrics were those of bfloat16, of three digits."""
    seen = []

    def metric(result, target):
        seen.append(result.dtype)
        return (result - target).abs()

    trainer = make(precision="bf16-mixed", metrics={"error": metric})
    trainer.fit(DataLoader(make_data(32), 16), DataLoader(make_data(8), 4))
    assert seen == [torch.float32, torch.float32]


def test_a_models_own_forward_stays(tmp_path):
    """An instance's forward, as of torch.compile, was lost after the first training_step."""
    model, calls = WithSteps(), []
    forward = model.forward
    model.forward = lambda inputs: calls.append(1) or forward(inputs)
    trainer = phalanx.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.01), strategy="single_device", show_progress=False
    )
    trainer.fit(DataLoader(make_data(64), 16))
    assert len(calls) == 4


@on_ranks(2)
def test_the_models_own_steps_are_used_also_inside_of_a_wrapper():
    results = []
    for loss in (None, F.mse_loss):
        model = WithSteps()
        trainer = phalanx.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.01), loss, strategy="mirrored", show_progress=False
        )
        trainer.fit(DataLoader(make_data(32), 16), DataLoader(make_data(2), 2))
        results.append((weights(trainer), sorted(trainer.metrics)))
    (own, names), (given, other) = results
    assert torch.equal(own, given)
    assert (names, other) == (["off"], ["loss"])


def test_a_dry_run_does_two_batches_and_writes_nothing(tmp_path):
    trainer = make(max_epochs=5, dry_run=True, checkpoint=tmp_path / "a", log_dir=tmp_path / "b")
    trainer.fit(DataLoader(make_data(), 16), DataLoader(make_data(), 16))
    assert trainer.step == 2
    assert trainer.metrics
    assert os.listdir(tmp_path) == []


def test_scalars_are_what_tensorboard_reads(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make(log_dir=tmp_path, log_every=2, max_epochs=2)
    trainer.fit(DataLoader(make_data(64), 16), DataLoader(make_data(8), 4))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [one.step for one in events.Scalars("train/loss")] == [2, 4, 6, 8]
    assert [one.value for one in events.Scalars("train/lr")] == pytest.approx([0.01] * 4)
    assert events.Scalars("val/loss")[-1].value == pytest.approx(trainer.metrics["loss"])


def test_all_that_makes_no_sense_is_said_at_once(tmp_path):
    model = nn.Linear(6, 1)
    with pytest.raises(ValueError, match=r"max_epochs must be 1 or more, got 0; accumulate .* 2.5; .*needs checkpoint"):
        make(model, max_epochs=0, accumulate=2.5, save_every=5)
    with pytest.raises(ValueError, match="give a loss, or Linear a training_step"):
        phalanx.Trainer(model, torch.optim.SGD)
    with pytest.raises(ValueError, match="there is no strategy 'ddp'"):
        make(model, strategy="ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="the StepLR does not use the optimizer that trains"):
        make(model, scheduler=scheduler)
    make(checkpoint=tmp_path).fit(DataLoader(make_data(16), 16))
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        make(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 1)), checkpoint=tmp_path).fit(DataLoader(make_data(16), 16))


def test_means_count_each_sample_once():
    sums = Sums(torch.device("cpu"))
    for a, b, count in ((torch.tensor([1.0, 2.0, 3.0]), torch.tensor(2.0), 3), (torch.tensor([[4.0]]), 6.0, 1)):
        sums.add_batch(count)
        sums.add_mean("a", a, count)
        sums.add_mean("b", b, count)
        sums.add("c", torch.tensor([1, count]), count)
    sums.add_mean("of the last batch only", 7.0, 1)
    means = {name: (total / count).tolist() for name, (total, count) in sums.compute(None).items()}
    assert means == {"a": 2.5, "b": 3.0, "c": [0.5, 1.0], "of the last batch only": 7.0}
    with pytest.raises(ValueError, match=r"metric 'a' has shape \(2, 2\) for 3 samples"):
        sums.add_mean("a", torch.ones(2, 2), 3)
    with pytest.raises(ValueError, match=r"metric 'c' has shape \(3,\), but had \(2,\) in the previous batch"):
        sums.add("c", torch.ones(3), 1)
    with pytest.raises(ValueError, match="has no sample"):
        Sums(torch.device("cpu")).compute(None)


def test_what_a_callback_draws_behind_a_step_changes_no_weight():
    """After the loss of a rank `on_step_end` of the latest step is not called again, so that survivors, which went back
    to the random numbers of its commit, drew others for dropout than an undisturbed run.
    """
    draw = LambdaCallback(on_step_end=lambda trainer, loss: (torch.rand(3), random.random()))
    ended = []
    for callbacks in ([], [draw]):
        trainer = make(make_model(dropout=0.3), max_epochs=2, seed=4, callbacks=callbacks)
        trainer.fit(DataLoader(make_data(), 16))
        ended.append(weights(trainer))
    assert torch.equal(*ended)
