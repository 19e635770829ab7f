"""One rank's state becomes another's, whatever its tensors look like and wherever they are to lie."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.elastic.held import Held, value_of
from torch import Tensor, nn

from phalanx._comm.backend.skeleton import Leaf, join, split
from phalanx.elastic.state_transfer import _places, devices_here, transfer_state
from phalanx.testing import run_ranks


def tensors_in(value: Any) -> list[Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return [value] if isinstance(value, Tensor) else [t for v in values if v is not value for t in tensors_in(v)]


def test_a_dict_keeps_its_class() -> None:
    """After a loss, a Counter was a dict: its next `count[new] += 1` raised KeyError."""
    value = {"seen": Counter("ab"), "lists": defaultdict(list, a=[1]), "by_name": OrderedDict(w=torch.ones(2))}
    tensors: list[Tensor] = []
    joined = join(split(value, tensors), tensors)
    assert [type(one) for one in joined.values()] == [Counter, defaultdict, OrderedDict]
    versioned = join(split(nn.BatchNorm1d(2).state_dict(), tensors), tensors)
    assert versioned._metadata[""] == {"version": 2}
    joined["seen"]["c"] += 1
    joined["lists"]["b"].append(2)
    assert joined["by_name"]["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_small_and_strided_tensors_arrive_in_new_memory_and_in_what_is_there(world_size: int) -> None:
    def body(rank: int, world_size: int) -> None:
        expected, group = value_of(1), dist.group.WORLD
        receivers = list(range(1, world_size))
        for mine in ({}, value_of(2)):  # who has just come has nothing, others have what has the same forms
            places = [t.data_ptr() for t in tensors_in(mine)]
            held = Held(expected if rank == 0 else mine)
            transfer_state([held], 0, receivers, group)
            got, theirs = tensors_in(held.value), tensors_in(expected)
            assert len(got) == len(theirs) == 7
            for one, other in zip(got, theirs, strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
            assert held.value["number"] == 1
            assert rank == 0 or not places or [t.data_ptr() for t in got] == places

    run_ranks(body, world_size)


class _Placed:
    """`_Placed` stands for a tensor on a GPU, of which no test machine has two."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_a_rank_receives_on_its_own_gpu_what_the_source_has_on_another():
    """The state of an optimizer, which a replacement has not made yet, was received on the source's GPU."""

    def leaves(*devices):
        return [Leaf(number, (2,), (1,), torch.float32, device) for number, device in enumerate(devices)]

    parameters, moments = leaves("cuda:0", "cuda:1", "cpu"), leaves("cuda:0", "cuda:1", "cpu", "cuda:7")
    mine = [_Placed("cuda:2"), _Placed("cuda:3"), _Placed("cpu")]
    assert devices_here([parameters, moments], [mine, []]) == {"cuda:0": "cuda:2", "cuda:1": "cuda:3", "cpu": "cpu"}
    (place,) = _places(leaves("cpu"), [], {"cpu": "meta"})
    assert place.device.type == "meta", "new tensors are made where the mapping says"
    assert devices_here([leaves("cuda:0")], [[_Placed("cpu")]]) == {}, "moved to another kind of device"
