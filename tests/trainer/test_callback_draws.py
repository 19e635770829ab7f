"""Callbacks draw random numbers at every point, and change no bit of a training, nor of one that goes on."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.shuffling import seed_globals
from tests.small_models import make_data
from tests.trainer.trainers import make, make_model, weights
from torch.utils.data import DataLoader

from phalanx.elastic.generator_states import GeneratorStates
from phalanx.trainer import Callback, LambdaCallback

POINTS = sorted(name for name in vars(Callback) if name.startswith("on_") and name != "on_error")
UPDATES = 12  # of two epochs


def draw(*_):
    torch.rand(3), random.random(), np.random.rand()


def fit(points=(), folder=None, *, most=None):
    model = make_model(dropout=0.3)
    seed_globals(4)
    trainer = make(
        model, max_epochs=2, max_steps=most, checkpoint=folder, save_every=None if folder is None else 1,
        callbacks=[LambdaCallback(**dict.fromkeys(points, draw))],
    )  # fmt: skip
    trainer.fit(DataLoader(make_data(), 16, shuffle=True), DataLoader(make_data(12), 5))
    return torch.cat([weights(trainer), torch.rand(3), torch.tensor([random.random(), np.random.rand()])])


@pytest.mark.slow(but=("points7",))
@pytest.mark.parametrize("points", [*[(one,) for one in POINTS], tuple(POINTS)])
def test_callbacks_that_draw_change_nothing_also_where_a_run_goes_on(points, tmp_path):
    """The draws at `on_checkpoint`, `on_epoch_begin` and `on_fit_begin` were those of the model: a run that went on
    had drawn others by then, and ended with other weights."""
    expected = fit()
    assert torch.equal(fit(points), expected)
    for most in random.Random(str(points)).sample(range(1, UPDATES), 2):
        fit(points, tmp_path / str(most), most=most)
        assert torch.equal(fit(points, tmp_path / str(most)), expected), most


def test_random_states_are_read_at_the_points_that_a_callback_overrides_alone(monkeypatch):
    def count(points):
        read = []
        monkeypatch.setattr(GeneratorStates, "capture", lambda self: read.append(1) or ())
        fit(points)
        return len(read)

    assert count(()) == 0
    assert count(("on_epoch_end",)) == 2 * 2
    assert count(("on_step_end",)) == 2 * UPDATES
