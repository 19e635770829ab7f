"""PyTorch's DistributedDataParallel over our groups runs PyTorch's operators and nothing else.

A watch for equal batches and a forgotten set_epoch read what each forward was given. Sparse, expanded and many other
inputs ended training, and the ranks ran different operators.
"""

import functools

import torch
from tests.modes import operators
from tests.on_ranks import on_ranks
from tests.small_models import batch_of, batchnorm_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.testing import run_ranks


def _operators_of_steps(rank, world_size, **options):
    ddp = DistributedDataParallel(batchnorm_model(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    streams = []
    for step in range(6):
        with operators() as names:
            optimizer.zero_grad()
            ddp(batch_of(rank, step, shape=(4, 3))).sum().backward()
            optimizer.step()
        streams.append(names)
    return streams


def test_the_operators_are_those_over_gloo():
    ours = run_ranks(_operators_of_steps, 2)
    assert ours[0] == ours[1]
    assert ours == run_ranks(_operators_of_steps, 2, backend="gloo")


@on_ranks(2)
def test_no_tensor_is_cloned():
    """PyTorch's `test_ddp_sink_noclone`, which asks for two GPUs, on the CPU."""
    ddp = DistributedDataParallel(nn.Linear(10, 10), find_unused_parameters=True)
    ddp._set_ddp_sink_clone(False)
    with operators() as names:
        ddp(torch.rand(10, 10)).sum().backward()
    assert not [name for name in names if name.startswith("aten.clone")]


def test_a_selective_checkpoint_may_contain_it():
    def decide(context, operator, *args, **kwargs):
        save = operator in (torch.ops.aten.addmm.default, torch.ops.aten.sum.default)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def fn(rank, world_size):
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        contexts = functools.partial(create_selective_checkpoint_contexts, decide)
        for step in range(5):
            inputs = batch_of(rank, step, shape=(4, 3))
            checkpoint(ddp, inputs, use_reentrant=False, context_fn=contexts).sum().backward()
        return [parameter.grad.tolist() for parameter in ddp.parameters()]

    first, second = run_ranks(fn, 2)
    assert first == second
