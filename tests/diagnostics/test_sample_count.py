"""How many samples a batch has, whatever a collate function makes of them."""

import dataclasses
import warnings
from collections import UserDict, namedtuple

import numpy
import pytest
import torch

from phalanx._comm.backend.torch_integration.training_steps import count_samples

Pair = namedtuple("Pair", "names x")


@dataclasses.dataclass
class Graphs:
    num: int
    x: torch.Tensor


class Odd:
    def shape(self):
        return 3


class Raises:
    @property
    def shape(self):
        raise RuntimeError("ask me not")


def nested():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*prototype", category=UserWarning)  # torch warns once a process
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(8, 3), 8),
        ([torch.ones(8, 3), torch.ones(8)], 8),
        ({"name": ["a"] * 5, "x": torch.ones(5, 2)}, 5),
        (UserDict(ids=torch.ones(7, 2)), 7),  # HuggingFace's BatchEncoding is one
        ((("a", "b", "c"), torch.ones(3)), 3),
        (Pair(["a", "b"], torch.ones(2)), 2),
        (Graphs(1, torch.ones(6, 2)), 6),
        ([torch.tensor(1.0), torch.ones(4)], 4),
        (numpy.ones((9, 2)), 9),
        ([("a", "b"), ("c", "d")], 2),
        (["a", "b", "c"], 3),
        (torch.tensor(3.0), None),
        ("text", None),
        ({}, None),
        (Odd(), None),
        (Raises(), None),
        ([Odd(), Odd()], 2),
        (None, None),
    ],
)
def test_a_batch_has_so_many_samples(batch, samples):
    """HuggingFace's batches counted 1, those that begin with names the letters of a list: samples a second were wrong
    by the size of a batch; and what had an odd `shape` failed in the middle of training.
    """
    assert count_samples(batch) == samples


def test_a_nested_tensor_has_as_many_samples_as_parts():
    """Asking it for its shape raises."""
    assert count_samples(nested()) == 2


def test_a_list_that_holds_itself_is_no_obstacle():
    endless = []
    endless.append(endless)
    assert count_samples(endless) is None


def test_nested_lists_cost_a_bounded_number_of_steps():
    """Without a tensor inside, all of 16 to the power of 8 lists were visited."""
    batch = [0.0] * 16
    for _ in range(7):
        batch = [batch] * 16
    assert count_samples(batch) == 16
