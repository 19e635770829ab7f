"""What training through the wrapper leaves in gradients and buffers, ours against PyTorch's, over the same backend."""

import pytest
import torch
from tests.on_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx import DistributedDataParallel


class Convolutional(nn.Module):
    """Batch norm, a tied weight, a frozen one, a branch that is sometimes left out, a checkpointed block."""

    def __init__(self):
        super().__init__()
        # No bias before batch norm: its gradient is rounding error, which Adam would blow up to a full step.
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.block[0].weight
        self.branch = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 3).requires_grad_(False)

    def forward(self, inputs, *, branch):
        hidden = checkpoint(self.block, self.features(inputs), use_reentrant=False)
        hidden = self.tied(hidden)
        if branch:
            hidden = hidden + self.branch(hidden)
        return {"out": (self.frozen(hidden), hidden)}


def _loss(ddp, rank, step, branch=True):
    generator = torch.Generator().manual_seed(10 * step + rank)
    out, hidden = ddp(torch.randn(3, 2, 4, 4, generator=generator), branch=branch)["out"]
    return out.square().mean() + hidden.abs().mean()


def _every_step(ddp, rank):
    for step in range(3):
        ddp.zero_grad()
        _loss(ddp, rank, step).backward()


def _accumulated(ddp, rank):
    for step in range(2):
        with ddp.no_sync():
            _loss(ddp, rank, step).backward()
    _loss(ddp, rank, 2).backward()


def _zeroed_in_place(ddp, rank):
    for step in range(3):
        ddp.zero_grad(set_to_none=False)
        _loss(ddp, rank, step).backward()


def _branch_on_rank_0(ddp, rank):
    for step in range(3):
        ddp.zero_grad()
        _loss(ddp, rank, step, branch=rank == 0).backward()


def _branch_on_no_rank(ddp, rank):
    for step in range(3):
        ddp.zero_grad()
        _loss(ddp, rank, step, branch=False).backward()


def _branch_never_after_the_first(ddp, rank):
    for step in range(3):
        _loss(ddp, rank, step, branch=step == 0).backward()


def _evaluated_between(ddp, rank):
    _loss(ddp, rank, 0).backward()
    ddp.eval()
    with torch.no_grad():
        _loss(ddp, rank, 1)
    ddp.train()
    ddp.zero_grad()
    _loss(ddp, rank, 2).backward()


def _trained(ddp, rank):
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        _loss(ddp, rank, step).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        optimizer.step()


def _scaled_and_clipped(ddp, rank):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(ddp, rank, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def _handled_by_the_user(ddp, rank):
    """Between backwards `.grad` is dropped, replaced, written into and zeroed by the script."""
    trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    for step in range(5):
        _loss(ddp, rank, step).backward()
        for parameter in trained:
            if step == 0:
                parameter.grad = None
            elif step == 1:
                parameter.grad = parameter.grad.clone()
            elif step == 2:
                parameter.grad.mul_(0.5)
            elif step == 3:
                parameter.grad.zero_()


def _hooked(ddp, rank):
    ddp.module.branch.weight.register_hook(lambda gradient: 2 * gradient)
    ddp.module.block.register_full_backward_hook(lambda _module, given, _received: (given[0] * 0.5,))
    _every_step(ddp, rank)


def _called_functionally(ddp, rank):
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(3, 2, 4, 4, generator=generator)
        state = {**dict(ddp.named_parameters()), **dict(ddp.named_buffers())}
        out, hidden = torch.func.functional_call(ddp, state, (inputs,), {"branch": True})["out"]
        (out.square().mean() + hidden.abs().mean()).backward()


def _asked_for_by_name(ddp, rank):
    for step in range(2):
        trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        _loss(ddp, rank, step).backward(inputs=trained)


UNUSED = {"find_unused_parameters": True}
SCENARIOS = [
    (_every_step, {}),
    (_every_step, {"gradient_as_bucket_view": False}),
    (_every_step, UNUSED),
    (_every_step, {"static_graph": True}),
    (_every_step, {"forward_sync_buffers": False}),
    (_accumulated, {}),
    (_accumulated, UNUSED),
    (_zeroed_in_place, {}),
    (_zeroed_in_place, UNUSED),
    (_branch_on_rank_0, UNUSED),
    (_branch_on_no_rank, UNUSED),
    (_branch_on_no_rank, {"static_graph": True}),
    (_branch_never_after_the_first, UNUSED),
    (_evaluated_between, {}),
    (_trained, {}),
    (_trained, {"static_graph": True}),
    (_scaled_and_clipped, {}),
    (_handled_by_the_user, {}),
    (_handled_by_the_user, {"gradient_as_bucket_view": False}),
    (_hooked, {}),
    (_called_functionally, {}),
    (_asked_for_by_name, {}),
]


def _outcome(wrap, scenario, options, rank):
    torch.manual_seed(rank)
    ddp = wrap(Convolutional(), bucket_cap_mb=0.0005, **{"gradient_as_bucket_view": True, **options})
    scenario(ddp, rank)
    left = {f"{name}.grad": parameter.grad for name, parameter in ddp.module.named_parameters()}
    return {**left, **ddp.module.state_dict()}


@pytest.mark.slow(but=("phalanx-2",))
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_every_scenario_leaves_what_pytorchs_own_leaves(rank, world_size, backend):
    for scenario, options in SCENARIOS:
        theirs = _outcome(nn.parallel.DistributedDataParallel, scenario, options, rank)
        ours = _outcome(DistributedDataParallel, scenario, options, rank)
        for name, reference in theirs.items():
            where = f"{name} after {scenario.__name__} with {options}"
            assert (ours[name] is None) == (reference is None), where
            if reference is not None:
                torch.testing.assert_close(ours[name], reference, msg=lambda text, where=where: f"{where}: {text}")
