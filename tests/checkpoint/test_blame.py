"""A state that could not be opened again is refused with the path of the value, and what to save in its place.

`save_checkpoint` refused a NumPy number or an `argparse.Namespace` somewhere in a large state without a word on where.
"""

import argparse
import collections
import dataclasses
import enum
import pathlib

import numpy as np
import pytest
import torch

from phalanx.checkpoint import load_checkpoint, save_checkpoint
from phalanx.checkpoint.blame import describe_unsafe_value
from phalanx.errors import CheckpointError


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Named(dict):
    pass


def circle():
    state: dict[str, object] = {}
    state["again"] = state
    return state


@pytest.mark.parametrize(
    ("state", "value", "advice"),
    [
        ({"best": np.float64(1)}, "state['best'] is a numpy.float64", "Save state['best'].item() instead."),
        ({"a": [1, (2, {"b": np.ones(2)})]}, "state['a'][1][1]['b'] is a numpy.ndarray", "Save torch.from_numpy(state"),
        ({"args": argparse.Namespace()}, "state['args'] is an argparse.Namespace", "Save vars(state['args']) instead"),
        ({"p": pathlib.PurePosixPath("x")}, "state['p'] is a pathlib.PurePosixPath", "Save str(state['p'])"),
        ({"e": Colour.RED}, f"state['e'] is a {__name__}.Colour", "Save state['e'].name in"),
        ({"s": Settings()}, f"state['s'] is a {__name__}.Settings", "Save dataclasses.asdict(state['s']) in"),
        ({"m": torch.nn.Flatten()}, "state['m'] is a torch.nn.modules.flatten.Flatten", "Save state['m'].state_dict()"),
        ({"d": Named(a=1)}, f"state['d'] is a {__name__}.Named", "Save dict(state['d']) in"),
        ({"d": collections.defaultdict(list)}, "state['d'] is a collections.defaultdict", "Save dict(state['d'])"),
        ({"d": {np.int64(1): 2}}, "is a numpy.int64", "Use numbers and strings as keys."),
        ({"f": print}, "state['f'] is a builtin_function_or_method", ""),
        (circle(), "", ""),
        ({"t": torch.ones(2), "o": collections.OrderedDict(a=1), "n": [None, True, 1j, "x", b"y"]}, "", ""),
    ],
)
def test_the_value_is_named_with_its_path_and_what_to_save(state, value, advice):
    said = describe_unsafe_value(state)
    assert value in said[0]
    assert advice in said[1]
    assert bool(value) == bool(said[0])


def test_a_state_that_is_nested_too_deeply_is_refused_on_every_rank(tmp_path):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="on rank 0: RecursionError"):
        save_checkpoint(tmp_path / "run.pt", {"deep": deep})


def test_the_refusal_says_it_and_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"epoch": 1})
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(path, {"weights": {"w": torch.ones(2)}, "history": [{"loss": 0.5}, {"loss": np.float32(0.25)}]})
    assert str(caught.value).startswith(f"save_checkpoint to {path} on rank 0: the state holds objects of numpy.")
    assert str(caught.value).endswith(
        ", which load_checkpoint would refuse to open: state['history'][1]['loss'] is a numpy.float32. The previous "
        "checkpoint is unchanged. Save state['history'][1]['loss'].item() instead."
    )
    assert load_checkpoint(path) == {"epoch": 1}
