"""Replicas compared: silence where they are equal, and the first difference where they are not."""

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx import DistributedDataParallel, MismatchError, check_replicas
from phalanx.testing import run_ranks


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, dtype=torch.bfloat16))


def _message(fn):
    with pytest.raises(MismatchError) as caught:
        fn()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 3])
def test_equal_replicas_pass(backend, world_size):
    run_ranks(lambda rank, world_size: check_replicas(_model()), world_size, backend=backend)


def test_the_first_difference_is_named_on_every_rank(backend):
    def fn(rank, world_size):
        model = _model()
        if rank == 2:
            with torch.no_grad():
                model[0].bias[1] += 0.25
                model[2].weight.add_(1)
        return _message(lambda: check_replicas(model))

    messages = run_ranks(fn, 3, backend=backend)
    assert len(set(messages)) == 1
    assert messages[0].startswith(
        "check_replicas: 2 of 9 tensors differ between the 3 ranks. The first is parameter '0.bias' (shape (4,), "
        "float32): rank 2 differs from rank 0 by up to 0.25."
    )


@pytest.mark.slow(but=("torch.float32-nan", "torch.bfloat16-values", "torch.complex64-signs of zero"))
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensor, rank: tensor.fill_(float("nan") if rank else 1.0), "one of the two tensors has a NaN"),
        (lambda tensor, rank: tensor.fill_(-0.0 if rank else 0.0), "differs from rank 0 in bits only"),
        (lambda tensor, rank: tensor.fill_(100.0 * rank), "rank 1 differs from rank 0 by up to 100"),
    ],
    ids=["nan", "signs of zero", "values"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@on_ranks(2)
def test_how_much_they_differ(rank, change, expected, dtype):
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=dtype))])
    with torch.no_grad():
        change(model[0], rank)
    message = _message(lambda: check_replicas(model))
    assert expected in message


@on_ranks(4)
def test_many_ranks_are_named_up_to_a_point(rank):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, rank)
    message = _message(lambda: check_replicas(layer))
    assert "rank 1 differs from rank 0 by up to 1, rank 2 differs from rank 0 by up to 2, rank 3" in message


@on_ranks(2)
def test_buffers_count_unless_told_otherwise(rank):
    model = _model()
    model[1].num_batches_tracked += rank
    check_replicas(model, buffers=False)
    message = _message(lambda: check_replicas(model))
    assert "buffer '1.num_batches_tracked' (shape (), int64): rank 1 differs from rank 0 by up to 1" in message


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, TorchDDP], ids=["ours", "torch"])
@on_ranks(2)
def test_a_wrapped_model_after_a_step(rank, backend, wrapper):
    ddp = wrapper(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    ddp(torch.randn(5, 3) + rank).sum().backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    check_replicas(ddp)  # running statistics differ, and rank 0's are everybody's at the next forward
    messages = _message(lambda: check_replicas(ddp, buffers=True)), _message(lambda: check_replicas(ddp.module))
    assert all("buffer '1.running_mean'" in message for message in messages)


@on_ranks(2)
def test_tensors_that_the_wrapper_ignores_are_ignored(rank):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
    ddp = DistributedDataParallel(model)
    nn.init.constant_(model[1].bias, rank)
    check_replicas(ddp)
    assert "'1.bias'" in _message(lambda: check_replicas(model))


@on_ranks(2)
def test_models_of_other_shapes_are_told_apart_by_structure(rank):
    message = _message(lambda: check_replicas(nn.Linear(1 + rank, 1)))
    assert message.startswith("check_replicas: the ranks' models differ.")
    assert "rank 1 has parameter 'weight' with shape (1, 2)" in message


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@on_ranks(3)
def test_of_sparse_tensors_what_they_store_is_compared(rank, layout):
    """They were made dense: 360 GB for the graph of 300,000 nodes."""
    model = nn.Linear(1, 1)
    positions = torch.tensor([[0, 299_999], [7 + (rank == 2), 0]])
    graph = torch.sparse_coo_tensor(positions, torch.ones(2), (300_000, 300_000), check_invariants=True)
    model.register_buffer("graph", graph if layout is torch.sparse_coo else graph.to_sparse_csr())
    message = _message(lambda: check_replicas(model))
    assert "buffer 'graph' (shape (300000, 300000), float32): rank 2 stores different elements than rank 0." in message


@on_ranks(3)
def test_a_group_of_some_ranks(rank):
    group = dist.new_group([0, 1])
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 5.0 if rank == 2 else 1.0)
    if rank < 2:
        check_replicas(layer, group)
    assert "rank 2 differs" in _message(lambda: check_replicas(layer))


def test_without_tensors_or_a_process_group_there_is_nothing_to_compare():
    check_replicas(_model())
    run_ranks(lambda rank, world_size: check_replicas(nn.ReLU()), 2)
