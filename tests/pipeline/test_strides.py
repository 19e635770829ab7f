"""A layer behind a cut finds its input in memory as in one process: what it draws, and returns, is the same."""

import pytest
import torch
from tests.on_ranks import on_ranks
from torch import nn

import phalanx
from phalanx.pipeline import wire
from phalanx.testing import run_ranks


class Transposed(nn.Module):
    """Its result lies in memory in another order than its elements have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x).view(-1, 2, 3).transpose(1, 2)


@pytest.mark.slow(but=("phalanx-8",))
@pytest.mark.parametrize(("backend", "lent_bytes"), [("phalanx", 8), ("phalanx", 2**20), ("gloo", 2**20)])
@on_ranks(2)
def test_a_value_arrives_with_its_strides(backend, lent_bytes):
    """A transposed value arrived contiguous, so Dropout behind the cut dropped other elements than in one process."""
    wire._LENT_BYTES = lent_bytes
    x, y = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), torch.ones(5, 3, 2)
    model = nn.Sequential(Transposed(), nn.Dropout(0.5))  # which drops in the order of memory
    pipe = phalanx.Pipeline(nn.Sequential(Transposed(), nn.Dropout(0.5)), micro_batches=1, schedule="gpipe",
                            balance=[1, 1], loss_fn=nn.MSELoss())  # fmt: skip
    for step in range(3):
        torch.manual_seed(step)
        loss = pipe.step(x, target=y)
        torch.manual_seed(step)
        torch.manual_seed(torch.randint(2**62, ()).item())
        torch.testing.assert_close(loss, nn.functional.mse_loss(model(x), y).detach())


def train_tied(rank, world_size):
    pipe = phalanx.Pipeline(tied_images(), micro_batches=1, schedule="gpipe", balance=[2, 1], loss_fn=nn.MSELoss())
    for _ in range(2):
        pipe.step(images(), target=images())
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


def tied_images():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 3, padding=1))
    model[2].weight = model[0].weight
    return model.double().to(memory_format=torch.channels_last)


def images():
    return torch.arange(2 * 3 * 16, dtype=torch.float64).view(2, 3, 4, 4) / 100


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_tied_parameter_may_have_any_strides(backend):
    """A parameter in channels_last that two ranks have ended with "input tensor has to be contiguous" over Gloo."""
    model = tied_images()
    for _ in range(2):
        nn.functional.mse_loss(model(images()), images()).backward()
    for found in run_ranks(train_tied, 2, backend=backend):
        for name, parameter in model.named_parameters():
            if name in found:
                torch.testing.assert_close(found[name], parameter.grad)
                assert name != "0.weight" or found[name].stride() == parameter.stride()


def gather_convolutions(rank, world_size):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    pipe = phalanx.Pipeline(model, micro_batches=1, schedule="gpipe", balance=[1, 2], loss_fn=nn.MSELoss())
    optimizer = torch.optim.AdamW(pipe.parameters(), fused=True)
    pipe.step(torch.randn(2, 8, 9, 9), target=torch.randn(2, 8, 5, 5))
    optimizer.step()
    found = []
    for rank0_only in (False, True):
        moments = pipe.optimizer_state_dict(optimizer, rank0_only=rank0_only)["state"]
        weights = pipe.state_dict(rank0_only=rank0_only)
        if not rank0_only or rank == 0:
            found += [weights["0.weight"], weights["2.weight"], moments[0]["exp_avg"], moments[2]["exp_avg_sq"]]
    return [tensor.stride() for tensor in found]


def test_a_state_that_is_gathered_has_the_strides_that_it_has_in_one_process():
    """Moments came contiguous, and a fused optimizer of one process went through them in the order of memory."""
    first, second = run_ranks(gather_convolutions, 2)
    assert set(first) == set(second) == {(72, 1, 24, 8)}
    assert len(first) == 2 * len(second) == 8
