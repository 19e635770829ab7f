import pytest
import torch
from tests.on_ranks import on_ranks
from torch import nn

from phalanx import DistributedDataParallel, MismatchError
from phalanx.ddp.structure import compare, describe
from phalanx.testing import run_ranks


def _differences(build, world_size, backend):
    def wrap(rank, world_size):
        with pytest.raises(MismatchError) as caught:
            DistributedDataParallel(build(rank))
        return str(caught.value)

    messages = run_ranks(wrap, world_size, backend=backend)
    assert len(set(messages)) == 1  # every rank says the same
    return messages[0]


def test_another_shape_on_one_rank_is_told_on_all(backend):
    message = _differences(lambda rank: nn.Sequential(nn.Linear(3 if rank == 1 else 4, 4)), 3, backend)
    assert (
        "rank 1 has parameter '0.weight' with shape (4, 3), float32, requires_grad, "
        "but rank 0 has shape (4, 4), float32, requires_grad" in message
    )
    assert "rank 2" not in message
    assert message.startswith("DistributedDataParallel: the ranks' models differ.")


def test_a_missing_and_an_extra_parameter_are_told_by_name(backend):
    message = _differences(lambda rank: nn.Sequential(nn.Linear(2, 2, bias=rank == 1)), 2, backend)
    assert "rank 1 has parameter '0.bias' (shape (2,), float32, requires_grad), but rank 0 has no such name" in message
    message = _differences(lambda rank: nn.Sequential(nn.Linear(2, 2, bias=rank == 0)), 2, backend)
    assert "rank 1 lacks parameter '0.bias'" in message


def _double_and_frozen(rank):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return nn.Sequential(model[0].double(), model[1].requires_grad_(False)) if rank else model


@on_ranks(2)
def test_each_kind_of_difference_is_told(rank):
    for build, options, texts in (
        (
            _double_and_frozen,
            {},
            (
                "'0.weight' with shape (2, 2), float64, requires_grad, but rank 0 has shape (2, 2), float32",
                "'1.weight' with shape (2, 2), float32, but rank 0 has shape (2, 2), float32, requires_grad",
            ),
        ),
        (lambda rank: nn.Linear(2, 2).requires_grad_(rank == 0), {}, ("rank 1 has parameter 'weight'",)),
        (
            lambda rank: nn.BatchNorm1d(2, track_running_stats=rank == 0),
            {},
            ("rank 1 lacks buffer 'running_mean' (shape (2,), float32), which rank 0 has",),
        ),
        (
            lambda rank: nn.Linear(2, 2),
            {"bucket_cap_mb": rank + 1},
            ("rank 1 passes bucket caps in MiB=(2,), rank 0 bucket caps in MiB=(1,)",),
        ),
        (lambda rank: nn.Sequential(*(nn.Linear(2, 2 + rank) for _ in range(6))), {}, ("and 4 more",)),
    ):
        with pytest.raises(MismatchError) as caught:
            DistributedDataParallel(build(rank), **options)
        assert all(text in str(caught.value) for text in texts), (texts, str(caught.value))


def test_the_same_names_in_another_order_are_a_difference():
    class Pair(nn.Module):
        def __init__(self, *names):
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.zeros(2)))

    mine, reference = describe(Pair("b", "a"), frozenset()), describe(Pair("a", "b"), frozenset())
    assert compare(mine, reference, 3) == ["rank 3 registers the same names in another order, from 'b' on"]
    assert compare(mine, mine, 3) == []
