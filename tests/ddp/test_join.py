"""PyTorch's Join around our wrapper gives what it gives around PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal, assert_same_on_all_ranks
from tests.ddp.models import batch_of, small_model
from tests.on_ranks import on_ranks
from tests.training import copy_gradients, copy_state
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import phalanx
from phalanx import DistributedDataParallel
from phalanx.ddp.join import JoinState, JoinStatus
from phalanx.errors import MismatchError
from phalanx.testing import RankFailed, run_ranks


def _train(ddp, rank, counts, epochs, contexts, *, accumulate=False):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    for epoch in range(epochs):
        with contexts():
            for step in range(counts[rank]):
                optimizer.zero_grad()
                if accumulate:
                    with ddp.no_sync():
                        ddp(batch_of(rank, epoch + 50, step)).square().mean().backward()
                ddp(batch_of(rank, epoch, step)).square().mean().backward()
                optimizer.step()
    return copy_state(ddp.module)


def _compare(ours, theirs):
    torch.testing.assert_close(ours, theirs)
    assert_same_on_all_ranks(ours)


@pytest.mark.slow(but=("phalanx-counts0-True",))
@pytest.mark.parametrize(("counts", "by_all"), [([0, 2], True), ([1, 3, 2], False), ([2, 0, 4, 1], True)])
def test_weights_are_those_of_pytorch(backend, counts, by_all):
    def fn(rank, world_size, wrap):
        ddp = wrap(small_model(), bucket_cap_mb=0.0001)
        return _train(ddp, rank, counts, 2, lambda: ddp.join(divide_by_initial_world_size=by_all))

    ours = run_ranks(fn, len(counts), DistributedDataParallel, backend=backend)
    _compare(ours, run_ranks(fn, len(counts), TorchDistributedDataParallel, backend="gloo"))


@pytest.mark.slow(but=("phalanx-unused",))
@pytest.mark.parametrize("case", ["batchnorm", "unused", "accumulate"])
def test_buffers_unused_parameters_and_accumulation_are_those_of_pytorch(backend, case):
    counts = [1, 3, 2]

    def fn(rank, world_size, wrap):
        ddp = wrap(small_model(batchnorm=case == "batchnorm"), find_unused_parameters=case == "unused")
        return _train(ddp, rank, counts, 2, lambda: Join([ddp]), accumulate=case == "accumulate")

    ours = run_ranks(fn, 3, DistributedDataParallel, backend=backend)
    _compare(ours, run_ranks(fn, 3, TorchDistributedDataParallel, backend="gloo"))


@on_ranks(2)
def test_two_models_in_one_context(rank, backend):
    first, second = DistributedDataParallel(small_model()), DistributedDataParallel(small_model(batchnorm=True))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.2)
    with Join([first, second]):
        for step in range([3, 1][rank]):
            optimizer.zero_grad()
            first(batch_of(rank, 0, step)).square().mean().backward()
            second(batch_of(rank, 1, step)).square().mean().backward()
            optimizer.step()
    phalanx.check_replicas(first)
    phalanx.check_replicas(second, buffers=True)


def test_sparse_gradients_count_the_ranks_that_pytorch_counts(backend):
    def fn(rank, world_size, by_all):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Embedding(6, 2, sparse=True))
        with ddp.join(divide_by_initial_world_size=by_all):
            for step in range([2, 1][rank]):
                ddp.zero_grad()
                ddp(torch.tensor([step])).sum().backward()
        return ddp.module.weight.grad.to_dense()[1, 0].item()

    assert run_ranks(fn, 2, True, backend=backend)[0] == 0.5
    assert run_ranks(fn, 2, False, backend=backend)[0] == 1.0


@on_ranks(2)
def test_gradients_of_a_rank_that_has_left_stay_as_they_were(rank, backend):
    ddp = DistributedDataParallel(small_model())
    with ddp.join():
        for step in range([3, 1][rank]):
            ddp.zero_grad()
            ddp(batch_of(rank, 0, step)).square().mean().backward()
            if step == 0:
                grads = copy_gradients(ddp)
    if rank == 1:
        assert_equal(copy_gradients(ddp), grads)


@on_ranks(2)
def test_early_termination_raises_on_all_ranks(rank, backend):
    ddp = DistributedDataParallel(small_model())
    with pytest.raises(RuntimeError, match=r"exhausted"):
        _train(ddp, rank, [1, 3], 1, lambda: ddp.join(throw_on_early_termination=True))


@on_ranks(2)
def test_without_the_context_a_rank_that_runs_out_of_data_is_told_of_it(rank):
    ddp = DistributedDataParallel(small_model())

    def train_and_meet():
        _train(ddp, rank, [1, 3], 1, lambda: ddp.join(enable=False))
        dist.barrier()

    with pytest.raises(MismatchError, match=r"`with torch\.distributed\.algorithms\.Join"):
        train_and_meet()


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (lambda: DistributedDataParallel(small_model(batchnorm=True), sync_batchnorm=True), "SyncBatchNorm layers"),
        (lambda: DistributedDataParallel(small_model(batchnorm=True), sync_batchnorm="auto"), "SyncBatchNorm layers"),
        (lambda: DistributedDataParallel(small_model(), static_graph=True), "learns the graph in the first step"),
    ],
)
def test_what_nobody_can_shadow_is_refused_by_name(wrap, text):
    def fn(rank, world_size):
        ddp = wrap()
        _train(ddp, rank, [0, 2], 1, ddp.join)

    with pytest.raises(RankFailed) as caught:
        run_ranks(fn, 2)
    assert text in str(caught.value.errors[0])


def test_zero_redundancy_is_refused_by_name():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model())
        optimizer = phalanx.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.2)
        with ddp.join():
            for step in range([1, 2][rank]):
                ddp(batch_of(rank, 0, step)).square().mean().backward()
                optimizer.step()

    with pytest.raises(RankFailed) as caught:
        run_ranks(fn, 2)
    assert "only one rank can update each part of the parameters" in str(caught.value.errors[0])


def test_the_join_state_tells_who_trains_and_whose_buffers_serve_all():
    join_state = JoinState(
        (
            JoinStatus(active=False),
            JoinStatus(active=True, syncs=True),
            JoinStatus(active=True),
            JoinStatus(active=False),
        )
    )
    assert (join_state.num_active, join_state.source, join_state.syncs, join_state.decides) == (2, 2, True, False)
