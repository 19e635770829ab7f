"""PyTorch's pipelining over the backend: stages on ranks, gradients of the whole model."""

import pytest
import torch
from tests.parity.beside_gloo import assert_same_as_gloo
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

MICROBATCHES = 4


def _layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]


def _data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 5, generator=generator)


def _loss(out, target):
    return nn.functional.mse_loss(out, target)


def _step(schedule, rank, world_size, last):
    inputs, targets = _data()
    losses = []
    arguments = {"target": targets, "losses": losses} if last else {}
    out = schedule.step(*([inputs] if rank == 0 else []), **arguments)
    return out.detach() if last else None, [loss.detach() for loss in losses]


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("world_size", [2])
def test_a_pipeline_gives_the_gradients_of_the_whole_model(schedule, world_size):
    def train(rank, world_size):
        layers, share = _layers(), 4 // world_size
        part = nn.Sequential(*layers[rank * share : (rank + 1) * share])
        stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
        plan = schedule(stage, n_microbatches=MICROBATCHES, loss_fn=_loss)
        out, losses = _step(plan, rank, world_size, rank == world_size - 1)
        return out, losses, [p.grad for p in part.parameters()]

    ours = assert_same_as_gloo(train, world_size)
    whole = nn.Sequential(*_layers())
    inputs, targets = _data()
    for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        (_loss(whole(x), y) / MICROBATCHES).backward()
    gradients = [g for _, _, part in ours for g in part]
    torch.testing.assert_close(gradients, [p.grad for p in whole.parameters()], rtol=0, atol=1e-6)


def test_interleaved_stages_give_what_gloo_gives():
    def train(rank, world_size):
        layers = _layers()
        stages = [PipelineStage(layers[i], i, 4, torch.device("cpu")) for i in (rank, rank + 2)]
        plan = ScheduleInterleaved1F1B(stages, n_microbatches=MICROBATCHES, loss_fn=_loss)
        out, losses = _step(plan, rank, world_size, rank == 1)
        return out, losses, [p.grad for i in (rank, rank + 2) for p in layers[i].parameters()]

    assert_same_as_gloo(train, 2)
