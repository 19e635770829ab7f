"""PyTorch's averaging of models, with our DistributedDataParallel over our backend, against its own over Gloo."""

import warnings
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.parity.beside_gloo import assert_same_as_gloo
from tests.small_models import batch_of, mlp
from tests.training import train
from torch import nn
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

import phalanx

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # this package still uses torch.jit.script
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.optim import PostLocalSGDOptimizer

WARMUP = 2


def _periodic(pairs):
    return averagers.PeriodicModelAverager(period=3, warmup_steps=WARMUP)


def _hierarchical(pairs):
    return HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), warmup_steps=WARMUP)


def _train_locally(rank, make_averager, first, last, wrap, saved=None):
    """Post-local SGD: all ranks average gradients at first, then pairs; models are averaged now and then."""
    pairs, _ = dist.new_subgroups(group_size=2)
    model = mlp()
    ddp = wrap(model)
    ddp.register_comm_hook(PostLocalSGDState(None, pairs, max(0, WARMUP - first)), post_localSGD_hook)
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(inner, make_averager(pairs))
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    weights = train(ddp, optimizer, [batch_of(rank, step) for step in range(first, last)])
    return weights, (model.state_dict(), optimizer.state_dict())


@pytest.mark.slow(but=("_periodic",))
@pytest.mark.parametrize("make_averager", [_periodic, _hierarchical])
def test_post_local_sgd_ends_with_the_weights_of_gloo(make_averager):
    def fn(rank, world_size):
        ours = dist.get_backend() == "phalanx"
        wrap = phalanx.DistributedDataParallel if ours else nn.parallel.DistributedDataParallel
        return _train_locally(rank, make_averager, 0, 7, wrap)[0]

    ended = assert_same_as_gloo(fn, 4, atol=1e-6)
    assert_equal(ended[0], ended[1])  # a pair holds the same at every step


@pytest.mark.slow
def test_its_step_counter_survives_a_checkpoint():
    def fn(rank, world_size):
        straight, _ = _train_locally(rank, _periodic, 0, 7, phalanx.DistributedDataParallel)
        _, saved = _train_locally(rank, _periodic, 0, 3, phalanx.DistributedDataParallel)
        assert saved[1]["step"] == 3
        resumed, _ = _train_locally(rank, _periodic, 3, 7, phalanx.DistributedDataParallel, saved)
        return straight, resumed

    for straight, resumed in assert_same_as_gloo(fn, 2, atol=1e-6):
        torch.testing.assert_close(straight, resumed)
