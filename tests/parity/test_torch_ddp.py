"""PyTorch's own DistributedDataParallel over the backend: the weights that Gloo's ranks end with."""

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.parity.beside_gloo import assert_same_as_gloo
from tests.small_models import batch_of, mlp
from tests.training import copy_state, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from phalanx.testing import run_ranks


class Gated(nn.Module):
    """The second branch takes part only in odd steps."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.left, self.right = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x, step=0):
        x = self.norm(self.trunk(x)).relu()
        return self.right(x) if step % 2 else self.left(x)


def _train(model, rank, steps=4, gated=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        out = model(batch_of(rank, step), step) if gated else model(batch_of(rank, step))
        out.square().mean().backward()
        optimizer.step()
    return copy_state(model.module)


def _bf16_hook(state, bucket):
    # Under its own name torch's DDP takes it with NCCL only; what it does asks for no GPU.
    return default_hooks.bf16_compress_hook(state, bucket)


# Each setting of DDP, as (arguments, communication hook, whether a branch goes unused).
SETTINGS = {
    "plain": ({}, None, False),
    "several buckets": ({"bucket_cap_mb": 0.0001}, None, False),
    "bucket views": ({"gradient_as_bucket_view": True}, None, False),
    "static graph": ({"static_graph": True}, None, False),
    "unused parameters": ({"find_unused_parameters": True}, None, True),
    "allreduce hook": ({}, default_hooks.allreduce_hook, False),
    "bf16 hook": ({}, _bf16_hook, False),
    "fp16 hook": ({"gradient_as_bucket_view": True}, default_hooks.fp16_compress_hook, False),
    "wrapped hook": ({}, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), False),
}


@pytest.mark.slow(but=("plain", "static graph", "unused parameters"))
@pytest.mark.parametrize("setting", SETTINGS)
def test_ddp_ends_with_the_weights_that_gloo_gives(setting):
    arguments, hook, gated = SETTINGS[setting]
    arguments = dict(arguments)
    if not gated:
        arguments.setdefault("find_unused_parameters", not arguments.get("static_graph", False))

    def fn(rank, world_size):
        model = DistributedDataParallel(Gated(seed=rank), **arguments)  # construction has to make it rank 0's
        if hook is not None:
            model.register_comm_hook(None, hook)
        return _train(model, rank, gated=gated)

    ranks = assert_same_as_gloo(fn, 2)
    learned = [name for name in ranks[0] if "running" not in name and "batches" not in name]
    assert_equal(*({name: weights[name] for name in learned} for weights in ranks))


def test_ddp_of_three_ranks_ends_within_rounding_of_gloo():
    def fn(rank, world_size):
        return _train(DistributedDataParallel(Gated(seed=rank), find_unused_parameters=True), rank)

    assert_same_as_gloo(fn, 3, atol=1e-6)


def test_no_sync_accumulates_and_the_last_backward_reduces():
    def fn(rank, world_size):
        model = DistributedDataParallel(nn.Linear(6, 3))
        with model.no_sync():
            model(batch_of(rank)).sum().backward()
        model(batch_of(rank, 1)).sum().backward()
        return model.module.weight.grad

    assert_same_as_gloo(fn, 2)


@pytest.mark.slow(but=("True",))
@pytest.mark.parametrize("by_initial_world_size", [True, False])
def test_join_lets_ranks_have_batches_of_their_own_number(by_initial_world_size):
    def fn(rank, world_size):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model], divide_by_initial_world_size=by_initial_world_size):
            train(model, optimizer, [batch_of(rank, step) for step in range(2 + 2 * rank)])
        return copy_state(model.module)

    assert_same_as_gloo(fn, 3, atol=1e-6)


def test_powersgd_hook_trains_like_over_gloo():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    def fn(rank, world_size):
        model = DistributedDataParallel(mlp((6, 32, 3), seed=rank))
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powersgd.powerSGD_hook)
        return _train(model, rank, steps=5)

    assert_same_as_gloo(fn, 2, atol=1e-6)


def test_sync_batch_norm_needs_a_gpu_and_says_so_as_over_gloo():
    def fn(rank, world_size):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(6)))
        dist.barrier()  # Gloo fails to connect to a rank that has already gone
        try:
            model(batch_of(rank))
        except ValueError as error:
            return str(error)
        return ""

    assert "SyncBatchNorm expected input tensor to be on" in assert_same_as_gloo(fn, 2)[0]


def test_ranks_with_different_models_hear_of_it_at_construction():
    def build(rank, world_size):
        # torch compares with rank 0, which is right by definition and only hears that the other has gone.
        reason = "rank 1 .* is gone" if rank == 0 else r"params\[0\] .* with sizes \[2, 5\] appears not to match"
        with pytest.raises(RuntimeError, match=reason):
            DistributedDataParallel(nn.Linear(4 + rank, 2))
        return dist.get_rank()

    assert run_ranks(build, 2) == [0, 1]
