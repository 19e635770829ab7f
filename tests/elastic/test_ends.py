"""How a function that is `elastic.run` ends, other than by returning."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from tests.elastic.jobs import Job, Strike
from tests.elastic.small_agent import SmallAgent

import phalanx
from phalanx import elastic
from phalanx.elastic import points
from phalanx.elastic.run import drop_unreadable


def leave_by_exit(job: Job) -> tuple[int, Any, bool]:
    """Early stopping, as scripts write it."""
    with phalanx.init(timeout=60.0):
        state = elastic.State(total=0.0)
        points.listen(lambda point: job.strike(point, state.step))

        @elastic.run(state)
        def train(state: Any) -> None:
            while True:
                if state.step == 4:
                    sys.exit(0)
                summed = torch.ones(())
                dist.all_reduce(summed)
                state.total += summed.item()
                state.commit()

        try:
            train(state)
        except SystemExit as end:
            return state.step, state.total, end.code == 0
        raise AssertionError("sys.exit did not pass")


def test_a_loop_that_calls_sys_exit_ends_as_one_that_returns(tmp_path: Path) -> None:
    """It ended its rank at once: the loss of another, before that had come as far, could not be survived any more."""
    job = Job(str(tmp_path), (Strike(1, points.FINISH, 4),))
    ended = SmallAgent(leave_by_exit, 2, job, folder=tmp_path).run()
    assert ended.generations == 1
    assert ended.results == [(4, 8.0, True)] * 2


def train_inside() -> tuple[str, int]:
    with phalanx.init(timeout=60.0):
        outer, inner = elastic.State(said=""), elastic.State()

        @elastic.run(inner)
        def tune(state: Any) -> None:
            state.commit()

        @elastic.run(outer)
        def train(state: Any) -> None:
            try:
                tune(inner)
            except RuntimeError as error:
                state.said = str(error)
            state.commit()

        train(outer)
        return outer.said, inner.step


def test_an_elastic_function_inside_of_another_is_refused_by_name(tmp_path: Path) -> None:
    """It took the agent's line from the outer one, whose next loss said that "the agent of this host has ended"."""
    ended = SmallAgent(train_inside, 2, folder=tmp_path).run()
    for said, steps in ended.results:
        assert said.startswith(
            "phalanx.elastic: tune is decorated by elastic.run, but was called inside another such function"
        )
        assert "call tune without elastic.run" in said
        assert steps == 0


def test_run_without_a_state_is_refused_by_name() -> None:
    """`@elastic.run` without `(state)` trained nothing: `train(state)` returned a function, and the script went on."""
    state, model = elastic.State(), torch.nn.Linear(1, 1)
    for given, kind in ((lambda state: None, "function"), (model, "Linear")):
        with pytest.raises(TypeError, match=rf"got a {kind}. Write @phalanx.elastic.run\(state\)"):
            elastic.run(given)  # type: ignore[arg-type]

    class Fit:
        def fit(self, state: Any) -> int:
            return int(state.step)

    with pytest.raises(TypeError, match=r"fit is a method, so `self` would receive the state"):
        elastic.run(state)(Fit.fit)  # type: ignore[arg-type]
    assert elastic.run(state)(Fit().fit)(state) == 0


def test_an_address_as_the_last_checkpoint_is_refused_before_the_first_step() -> None:
    """The job ended in a FileNotFoundError when the last ranks were to save, and their state was lost."""
    with pytest.raises(ValueError, match=r"checkpoint='s3://bucket/last.pt' is not a local file"):
        elastic.run(elastic.State(), checkpoint="s3://bucket/last.pt")


def test_a_value_that_torch_does_not_load_is_left_out_of_the_last_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    """One NumPy number among the values ended the save, and all was lost."""
    values = {
        "best": numpy.float64(0.5),
        "rng": numpy.random.default_rng(1),
        "history": [numpy.float64(1), 2],
        "seen": numpy.ones(3),
    }
    objects = {"mine": {"loss": numpy.float32(2)}, "clock": {"began": datetime.datetime(2026, 12, 1)}}
    kept = drop_unreadable({"objects": objects, "values": values, "position": None})
    assert kept["objects"]["clock"] is None
    assert kept["values"] == {"best": 0.5, "history": [1, 2]}
    assert type(kept["objects"]["mine"]["loss"]) is float
    assert type(kept["values"]["best"]) is float
    assert "'rng' (a Generator), 'seen' (a ndarray), the state of 'clock'" in caplog.text
