"""What forwards change is found, however they do it, and given back as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from phalanx import elastic
from phalanx.elastic.state import commits_of
from phalanx.elastic.step import ForwardChanges


def _replace(tensor: Tensor) -> None:
    tensor.data = tensor.data + 1


def _grow(tensor: Tensor) -> None:
    tensor.data = torch.cat([tensor.data, tensor.data])


WAYS: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda tensor: tensor.add_(1),
    "another tensor for data": _replace,
    "data in place": lambda tensor: tensor.data.add_(1),
    "another shape": _grow,
}


@pytest.mark.parametrize("steps_before", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_taken_back_in_whichever_step_the_loss_comes(way: str, steps_before: int) -> None:
    """Changes through `.data`, which no version tells of, stayed: a step that was done again changed it twice."""
    changing, still = torch.zeros(3), torch.ones(2)
    watch = ForwardChanges([changing, still])
    for _ in range(steps_before):
        watch.begin_step()
        WAYS[way](changing)
        watch.find_changes()
        watch.end_step()
    expected = changing.clone()
    for _ in range(2):
        watch.begin_step()
        WAYS[way](changing)
        assert watch.restore() == []
        assert torch.equal(changing, expected)
        assert torch.equal(still, torch.ones(2))


def test_one_that_took_the_memory_of_another_gives_it_back() -> None:
    """`slow.data = fast.data`: what is copied back must not go to fast."""
    slow, fast = torch.zeros(3), torch.ones(3)
    watch = ForwardChanges([slow])
    watch.begin_step()
    slow.data = fast.data
    watch.restore()
    assert torch.equal(slow, torch.zeros(3))
    assert torch.equal(fast, torch.ones(3))


def test_one_that_changes_for_the_first_time_in_a_later_step_is_told() -> None:
    tensor = torch.zeros(3)
    watch = ForwardChanges([tensor])
    watch.begin_step()
    watch.find_changes()
    watch.end_step()
    watch.begin_step()
    tensor.add_(1)
    assert watch.restore() == [0]


def test_inference_tensors_are_not_watched() -> None:
    """They have no version to ask for, and cannot be changed."""
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.mean = nn.Parameter(torch.zeros(2), requires_grad=False)
    assert model.mean.is_inference()
    state = elastic.State(model=model)
    assert list(commits_of(state).objects.watched_tensors().values()) == ["model.weight", "model.bias"]
