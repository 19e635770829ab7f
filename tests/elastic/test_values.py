"""State refuses trained objects inside plain values, and a loss restores values in the objects that hold them."""

from __future__ import annotations

import pickle
import random
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.elastic.jobs import Job, Strike
from tests.elastic.small_agent import run_twice
from torch import nn

import phalanx
from phalanx import elastic
from phalanx.elastic.small_state import restore_values
from phalanx.elastic.state import commits_of


def _trained_objects() -> dict[str, Any]:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    return {
        "Linear": net,
        "Adam": optimizer,
        "StepLR": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "GradScaler": torch.amp.GradScaler("cpu"),
        "DistributedSampler": phalanx.DistributedSampler(range(4)),
    }


@pytest.mark.parametrize("kind", _trained_objects())
def test_a_trained_object_inside_a_plain_value_is_refused_by_name(kind: str) -> None:
    """With `State(nets={"a": net})` a replacement trained its own initial models, and the job ended with success."""
    thing = _trained_objects()[kind]
    for nested in ({"a": thing}, [0, [thing]], SimpleNamespace(inner=thing)):
        with pytest.raises(
            TypeError, match=rf"State: 'nets' cannot be recorded: it contains a {kind}, .* own argument"
        ):
            elastic.State(best=0.0, nets=nested)
    state = elastic.State(best=0.0)
    with pytest.raises(TypeError, match=rf"'late' is a {kind}, .* State\(late=late\)"):
        state.late = thing


class _Metric:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_values_that_nothing_trains_are_accepted() -> None:
    settings = {"loss": nn.MSELoss(), "classes": [nn.Linear], "sum": torch.zeros(2)}
    state = elastic.State(metric=_Metric(), settings=settings, noise=torch.Generator(), sum=torch.zeros(2))
    state.late, state.metric_of_epoch = nn.ReLU(), _Metric()
    commits_of(state).save()
    assert state.settings is settings


class _Stopper:
    def __init__(self) -> None:
        self.bad = 0


def _train(job: Job) -> tuple[Any, ...]:
    with phalanx.init(timeout=60.0):
        history: dict[str, list[int]] = {"steps": []}
        stopper, losses, seen, recent = _Stopper(), [], set(), deque(maxlen=2)
        drawn, noise, plain = defaultdict(int), np.random.default_rng(1), random.Random(1)
        state: Any = elastic.State(
            history=history, stopper=stopper, losses=losses, seen=seen, recent=recent, drawn=drawn, noise=noise,
            plain=plain, same=losses,
        )  # fmt: skip

        @elastic.run(state)
        def train(state: Any) -> None:
            while state.step < 6:
                stopper.bad += 1
                history["steps"].append(state.step)
                losses.append(plain.random())
                seen.add(state.step)
                recent.append(state.step)
                drawn[int(noise.integers(4))] += 1
                if state.step == 2:
                    state.late = getattr(state, "late", 0) + 1  # set for the first time in a step that is lost
                job.strike("backward", state.step)
                dist.barrier()
                state.commit()

        train(state)
        names = history, stopper, losses, seen, recent, drawn, noise, plain, losses
        kept = [own is value for own, value in zip(names, list(state._values.values())[2:11], strict=True)]
        return kept, stopper.bad, state.late, history, losses, seen, recent, drawn, noise.random(), plain.random()


def test_an_object_that_the_loop_uses_by_its_own_name_returns_to_the_commit(tmp_path: Path) -> None:
    """`State(stopper=stopper)` made another stopper of it, and the loop went on with the one that nothing restored."""
    job = Job("", (Strike(1, "backward", 2), Strike(0, "backward", 4)))
    quiet, struck = run_twice(_train, 2, job, folder=tmp_path)
    assert struck.results == quiet.results
    assert all(all(result[0]) for result in struck.results)
    assert struck.results[0][1] == 6


def test_objects_of_several_names_stay_the_same_object_after_a_loss() -> None:
    """Contents are loaded into an object only where no other value refers to the saved one."""
    old = {"step": 1}
    values: dict[str, Any] = {"best": old, "history": [old], "other": old, "kind": [1]}
    saved: dict[str, Any] = pickle.loads(pickle.dumps({"best": {"step": 0}, "history": [], "other": [], "kind": (1,)}))
    saved["history"].append(saved["best"])
    first = values["history"]
    restore_values(values, saved)
    assert values["history"] is first == [{"step": 0}]
    assert values["best"] is first[0]
    assert (values["other"], values["kind"], old) == ([], (1,), {"step": 1})

    one: dict[str, Any] = {"step": 1}
    values = {"a": one, "b": one}
    restore_values(values, pickle.loads(pickle.dumps({"a": {"step": 0}, "b": {"step": 2}})))
    assert values == {"a": {"step": 0}, "b": {"step": 2}}
    assert values["a"] is one


class _Slots:
    __slots__ = ("__dict__", "number")


class _List(list[int]):
    pass


class _Own:
    def __getstate__(self) -> dict[str, Any]:
        return {}


class _Cycle:
    def __init__(self) -> None:
        self.call = self.method

    def method(self) -> _Cycle:
        return self


@pytest.mark.parametrize("kind", [_Slots, _List, _Own, _Cycle, type(None), type(...), object, complex])
def test_an_object_with_more_state_than_its_dict_is_replaced(kind: Any) -> None:
    values = {"thing": kind()}
    saved = {"thing": kind()}
    new = saved["thing"]
    restore_values(values, saved)
    assert values["thing"] is new


@pytest.mark.parametrize("name", ["epochs", "commit", "state_dict"])
def test_a_value_cannot_hide_what_state_itself_has(name: str) -> None:
    """It was accepted, and reading it gave the method."""
    state = elastic.State(seen=0)
    with pytest.raises(ValueError, match=f"the name '{name}' is reserved"):
        setattr(state, name, 10)
