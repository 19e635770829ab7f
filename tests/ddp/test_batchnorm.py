"""`sync_batchnorm=`: when layers come to span ranks, and what is said about it."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from tests.small_models import batchnorm_model
from tests.training import train
from torch import nn

from phalanx import DistributedDataParallel, SyncBatchNorm
from phalanx.ddp.batchnorm import SYNC_BELOW, batch_size, decide_sync
from phalanx.testing import run_ranks


def _is_synced(ddp):
    return isinstance(ddp.module[1], SyncBatchNorm)


def test_the_threshold():
    assert SYNC_BELOW == 16
    assert [decide_sync(size) for size in (0, 1, 15, 16, 17)] == [True, True, True, False, False]


def test_a_batch_is_dimension_0_of_the_first_tensor_that_has_one():
    assert batch_size([torch.tensor(1.0), torch.ones(5, 2), torch.ones(7)]) == 5
    assert batch_size([torch.ones(0, 2)]) == 0
    assert batch_size([torch.tensor(1.0)]) is None
    assert batch_size([]) is None


@pytest.mark.parametrize(("choice", "expected"), [(False, False), (True, True), ("auto", False)])
@on_ranks(2)
def test_what_construction_does(choice, expected):
    assert _is_synced(DistributedDataParallel(batchnorm_model(), sync_batchnorm=choice)) == expected


@pytest.mark.parametrize(("sizes", "expected"), [((16, 15), True), ((16, 17), False), ((0, 40), True)], ids=str)
def test_auto_goes_by_the_smallest_batch_of_all_ranks(backend, caplog, sizes, expected):
    def fn(rank, world_size):
        caplog.set_level(logging.INFO, "phalanx")
        ddp = DistributedDataParallel(batchnorm_model(), sync_batchnorm="auto", check=False)
        parameters = [id(parameter) for parameter in ddp.parameters()]
        synced = []
        for size in (sizes[rank], 40, 2):  # the first decides
            ddp(torch.randn(size, 3)).sum().backward()
            synced.append(_is_synced(ddp))
        assert [id(parameter) for parameter in ddp.parameters()] == parameters
        return synced, caplog.messages

    (synced, (line,)), (others, nothing) = run_ranks(fn, 2, backend=backend)
    assert synced == others == [expected] * 3
    assert line.startswith(f'sync_batchnorm="auto": the smallest batch of a rank is {min(sizes)},')
    assert ("so the BatchNorm layers (1) now normalize over the batches of all 2 ranks" in line) == expected
    assert nothing == []


def test_a_batch_that_cannot_be_seen_leaves_layers_as_they_are(caplog):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = batchnorm_model()

        def forward(self, batch):
            return self.model(batch())

    def fn(rank, world_size):
        caplog.set_level(logging.INFO, "phalanx")
        ddp = DistributedDataParallel(Hidden(), sync_batchnorm="auto", check=False)
        ddp(lambda: torch.randn(4, 3)).sum().backward()
        return caplog.messages

    ((line,), nothing) = run_ranks(fn, 2)
    assert "the smallest batch of a rank cannot be determined from forward's arguments, so the BatchNorm layers" in line
    assert nothing == []


@on_ranks(2)
def test_evaluation_and_accumulation_decide_nothing(rank):
    ddp = DistributedDataParallel(batchnorm_model(), sync_batchnorm="auto", broadcast_buffers=False)
    if rank == 0:  # alone: a collective would wait for the other rank
        ddp.eval()
        with torch.no_grad():
            ddp(torch.randn(4, 3))
        ddp.train()
        with torch.no_grad():
            ddp(torch.randn(4, 3))
        with ddp.no_sync():
            ddp(torch.randn(4, 3)).sum().backward()
    before = _is_synced(ddp)
    ddp(torch.randn(4, 3)).sum().backward()
    assert (before, _is_synced(ddp)) == (False, True)


def test_a_model_without_batchnorm_and_a_job_of_one_rank_are_left_alone():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(nn.Linear(3, 1), sync_batchnorm="auto")
        ddp(torch.randn(2, 3)).sum().backward()
        other = DistributedDataParallel(batchnorm_model(), sync_batchnorm="auto")
        other(torch.randn(2, 3)).sum().backward()
        return _is_synced(other)

    assert run_ranks(fn, 1) == [False]
    assert run_ranks(fn, 2) == [True, True]


@on_ranks(2)
def test_a_batchnorm_that_is_the_whole_model_is_converted():
    ddp = DistributedDataParallel(nn.BatchNorm1d(3), sync_batchnorm="auto")
    ddp(torch.randn(2, 3)).sum().backward()
    assert (isinstance(ddp.module, SyncBatchNorm), ddp.module.process_group) == (True, None)


def test_layers_span_the_group_of_the_wrapper_and_the_model_can_be_copied():
    def fn(rank, world_size):
        group = dist.new_group([0, 1])
        if rank == 2:
            return None
        ddp = DistributedDataParallel(batchnorm_model(), process_group=group, sync_batchnorm=True)
        default = DistributedDataParallel(batchnorm_model(), process_group=group)
        assert not _is_synced(default)
        ddp(torch.full((2, 3), float(rank))).sum().backward()
        return ddp.module[1].process_group is group, ddp.module[1].running_mean

    first, second, _ = run_ranks(fn, 3)
    assert first[0] is second[0] is True
    assert torch.equal(first[1], second[1])

    def copies(rank, world_size):
        return isinstance(
            copy.deepcopy(DistributedDataParallel(batchnorm_model(), sync_batchnorm=True).module)[1], SyncBatchNorm
        )

    assert run_ranks(copies, 2) == [True, True]


def test_training_is_that_of_one_process_with_the_whole_batch(backend):
    batches = [torch.randn(6, 3) for _ in range(3)]

    def fn(rank, world_size):
        ddp = DistributedDataParallel(batchnorm_model(), sync_batchnorm="auto")
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), [batch.chunk(2)[rank] for batch in batches])
        return dict(ddp.module.state_dict())

    alone = batchnorm_model()
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches)
    for state in run_ranks(fn, 2, backend=backend):
        torch.testing.assert_close(state, dict(alone.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("choice", [None, 16, "always", 1])
def test_other_choices_are_refused(choice):
    with pytest.raises(ValueError, match='sync_batchnorm must be True, False or "auto", got'):
        DistributedDataParallel(nn.Linear(1, 1), sync_batchnorm=choice)


@on_ranks(2)
def test_ranks_with_other_layers_are_told_at_construction(rank):
    layer = nn.BatchNorm1d(4, affine=False, track_running_stats=False) if rank else nn.Identity()
    with pytest.raises(dist.DistBackendError, match="rank 1 passes BatchNorm layers=1, rank 0 BatchNorm layers=0"):
        DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), layer), sync_batchnorm="auto")
