"""What State accepts as a plain value, and what a loss restores in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx import elastic
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
        with pytest.raises(TypeError, match=rf"State: 'nets' cannot be recorded: it contains a {kind}, .* of its own"):
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
