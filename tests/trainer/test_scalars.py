"""Scalars are written by whoever is rank 0 at the time."""

import pytest

from phalanx.loggers import CSVLogger, TensorBoardLogger
from phalanx.loggers.guarded import GuardedLoggers
from phalanx.trainer.trainer import Scalars


def test_who_becomes_rank_0_goes_on_writing_beside_what_is_there(tmp_path):
    """The rank that took over from a lost rank 0 wrote nothing."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    is_main = {"first": True, "second": False}
    first, second = (
        Scalars(GuardedLoggers([TensorBoardLogger(tmp_path)], lambda name=name: is_main[name])) for name in is_main
    )
    for step in range(6):
        if step == 3:  # the first one is lost
            first.loggers.finalize("failed")
            is_main.update(first=False, second=True)
        for one in (first, second):
            one.add({"loss": float(step)}, step)
    second.loggers.finalize("success")
    assert len(list(tmp_path.iterdir())) == 2
    events = []
    for path in tmp_path.iterdir():
        reader = event_accumulator.EventAccumulator(str(path))
        reader.Reload()
        events += [(one.step, one.value) for one in reader.Scalars("loss")]
    assert sorted(events) == [(step, float(step)) for step in range(6)]


def test_a_step_that_is_repeated_after_a_loss_adds_no_empty_row(tmp_path):
    """metrics.csv had a row `18,,,,` after a loss in the validation."""
    scalars = Scalars(GuardedLoggers([CSVLogger(tmp_path)], lambda: True))
    scalars.begin(None, {})
    for _ in range(2):
        scalars.add({"val/loss": 0.5}, 18)
    scalars.loggers.finalize("success")
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [row for row in rows if row.startswith("18,")] == ["18,0.5"]
