"""What a Trainer gives its loggers, and from which rank."""

import json

import pytest
import torch
from tests.loggers.logged_runs import rows_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import phalanx
from phalanx.loggers import CSVLogger
from phalanx.testing import run_ranks


def fit(folder, *, max_epochs=2, checkpoint=None, logger=None, strategy="single_device", **options):
    torch.manual_seed(0)
    inputs = torch.randn(32, 3)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Linear(3, 1)
    logger = CSVLogger(folder) if logger is None else logger
    trainer = phalanx.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.125), F.mse_loss, max_epochs=max_epochs, log_every=1,
        checkpoint=checkpoint, show_progress=False, strategy=strategy, logger=logger, **options,
    )  # fmt: skip
    trainer.fit(DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
    return trainer


def test_one_rank_logs_losses_validation_and_settings(tmp_path):
    def train(rank, world_size):
        fit(tmp_path / "logs", strategy="mirrored", hyperparameters={"width": 3, "optimizer": "mine"})

    run_ranks(train, 2)
    rows = rows_of(tmp_path / "logs")
    assert [int(row["step"]) for row in rows if row["train/loss"]] == list(range(1, 9))  # each once, of two ranks
    assert [int(row["step"]) for row in rows if row["val/loss"]] == [4, 8]
    settings = json.loads((tmp_path / "logs" / "hyperparameters.json").read_text())
    assert settings["model"] == "Linear"
    assert settings["parameters"] == 4
    assert settings["replicas"] == 2
    assert settings["batch_size"] == 8
    assert settings["optimizer/lr"] == 0.125
    assert (settings["width"], settings["optimizer"]) == (3, "mine")  # the user's own go first
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_a_run_that_goes_on_logs_each_step_once(tmp_path):
    fit(tmp_path / "logs", checkpoint=tmp_path / "checkpoint")
    fit(tmp_path / "logs", checkpoint=tmp_path / "checkpoint", max_epochs=3)
    rows = rows_of(tmp_path / "logs")
    assert [int(row["step"]) for row in rows if row["train/loss"]] == list(range(1, 13))


class Rows(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@pytest.mark.slow(but=("False-3-35", "True-1-35"))
@pytest.mark.parametrize("num_samples", [35, 48])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_logged_loss_is_that_of_all_samples_of_the_update(tmp_path, num_samples, accumulate, is_stream):
    """It was that of the last batch, and replicas with fewer samples of a stream counted as much as the others."""
    torch.manual_seed(0)
    inputs = torch.randn(num_samples, 3)
    targets = inputs.square().sum(1, keepdim=True) * torch.arange(num_samples)[:, None]  # batches differ
    data = TensorDataset(inputs, targets)
    loader = DataLoader(Rows(data), 8) if is_stream else DataLoader(data, 8, drop_last=True)

    def make():
        torch.manual_seed(1)
        return nn.Linear(3, 1)

    def train(rank, world_size):
        model = make()
        phalanx.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=1e-3), F.mse_loss, strategy="mirrored", log_every=1,
            accumulate=accumulate, show_progress=False, logger=CSVLogger(tmp_path),
        ).fit(loader)  # fmt: skip

    run_ranks(train, 2)
    alone, expected = make(), []
    optimizer = torch.optim.SGD(alone.parameters(), lr=1e-3)
    used = num_samples if is_stream else num_samples // 8 * 8
    for begin in range(0, used, 8 * accumulate):
        update = slice(begin, min(begin + 8 * accumulate, used))
        loss = F.mse_loss(alone(inputs[update]), targets[update])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert [float(row["train/loss"]) for row in rows_of(tmp_path)] == pytest.approx(expected, rel=1e-4)


class Failing:
    def log_metrics(self, metrics, step):
        raise ConnectionError("the server is gone")


def test_a_logger_that_fails_ends_no_training(tmp_path, caplog):
    trainer = fit(tmp_path, logger=[Failing(), CSVLogger(tmp_path)])
    assert trainer.step == 8
    assert sum("the server is gone" in record.getMessage() for record in caplog.records) == 1
    assert [int(row["step"]) for row in rows_of(tmp_path) if row["train/loss"]] == list(range(1, 9))


def test_a_batch_size_that_nobody_knows_is_not_logged(tmp_path):
    """A function's own batches were logged as batches of one sample."""
    model = nn.Linear(3, 1)
    trainer = phalanx.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, max_epochs=1, show_progress=False,
        strategy="single_device", logger=CSVLogger(tmp_path),
    )  # fmt: skip
    trainer.fit(lambda context: [(torch.ones(4, 3), torch.ones(4, 1))])
    assert "batch_size" not in json.loads((tmp_path / "hyperparameters.json").read_text())


def test_a_logger_hears_how_a_fit_ends(tmp_path):
    class Noting:
        def __init__(self):
            self.heard = []

        def log_metrics(self, metrics, step):
            pass

        def finalize(self, status):
            self.heard.append(status)

    noting = Noting()

    def stop(trainer, loss):
        raise kind

    for kind in (ArithmeticError(), KeyboardInterrupt()):
        with pytest.raises(type(kind)):
            fit(tmp_path, logger=noting, callbacks=phalanx.trainer.LambdaCallback(on_step_end=stop))
    fit(tmp_path, logger=noting)
    assert noting.heard == ["failed", "interrupted", "success"]


def test_a_wrong_logger_is_refused_before_a_model_is_set_up(tmp_path):
    with pytest.raises(TypeError, match="Trainer: logger: a int is not a logger"):
        fit(tmp_path, logger=3)
