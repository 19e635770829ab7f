"""Every optimizer of torch.optim under ZeRO, with later groups, schedulers and closures, against itself alone."""

import functools

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from tests.optim.random_training import OPTIMIZERS, Training, find_difference, groups_of, reload_plain

import phalanx

_SHARDED = [one for one in OPTIMIZERS if one is not torch.optim.LBFGS]  # which is refused
_OFFLOADED = [one for one in _SHARDED if one is not torch.optim.SparseAdam]  # sparse gradients are not copied


def _reload_sharded(optimizer, options, offload):
    optimizer.consolidate_state_dict()
    state = [optimizer.state_dict() if optimizer.rank == 0 else None]
    dist.broadcast_object_list(state)
    again = phalanx.ZeroRedundancyOptimizer(groups_of(optimizer), type(optimizer.optim), offload=offload, **options)
    again.load_state_dict(state[0])
    return again


def _is_close(one, other):
    """Offloading updates with torch's fused kernels, whose last bits are others."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow(but=("offload",))
@pytest.mark.parametrize("offload", [False, True], ids=["shared", "offload"])
@on_ranks(2)
def test_every_optimizer_under_zero_trains_as_it_does_alone(offload):
    problems = []
    for optimizer_class in _OFFLOADED if offload else _SHARDED:
        for seed in range(1 if offload else 2):
            training = Training(optimizer_class, seed)
            expected = training.play(training.model(), optimizer_class, reload=reload_plain)
            make = functools.partial(phalanx.ZeroRedundancyOptimizer, optimizer_class=optimizer_class, offload=offload)
            found = training.play(training.model(), make, reload=functools.partial(_reload_sharded, offload=offload))
            if difference := find_difference(found, expected, _is_close if offload else torch.equal):
                problems.append(f"{optimizer_class.__name__} {seed}: {difference}")
    assert problems == []
