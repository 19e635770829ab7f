"""A layer behind a cut finds its input in memory as in one process: what it draws, and returns, is the same."""

import random

import pytest
import torch
from torch import nn

import phalanx
from phalanx.pipeline import wire
from phalanx.testing import run_ranks

CASES = 8


class Rearranged(nn.Module):
    """The result of a layer by a chain of drawn views: transposed, sliced, expanded, conjugated."""

    def __init__(self, seed):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.seed = seed

    def forward(self, x):
        draw = random.Random(self.seed)
        x = self.layer(x).view(-1, 2, 3)
        if draw.random() < 0.3:
            x = torch.complex(x, x + 1).conj()
        for _ in range(draw.randint(1, 4)):
            kind = draw.choice(["transpose", "slice", "expand", "in_memory", "unsqueeze"])
            dim = draw.randrange(1, x.dim())
            if kind == "transpose":
                x = x.transpose(dim, draw.randrange(1, x.dim()))
            elif kind == "slice":
                x = x.narrow(dim, 0, max(x.shape[dim] - 1, 1))
            elif kind == "expand":
                x = x.unsqueeze(dim).expand(*x.shape[:dim], 2, *x.shape[dim:])
            elif kind == "in_memory":
                other = draw.randrange(x.dim())
                x = x.transpose(other, dim).contiguous().transpose(other, dim)
            else:
                x = x.unsqueeze(dim)
        return x


class Drawing(nn.Module):
    """Drops elements in the order of memory."""

    def forward(self, x):
        if x.is_complex():
            x = torch.view_as_real(x * 1j).sum(-1)
        return nn.functional.dropout(x, 0.5, self.training).flatten(1).sum(1)


def draw_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(Rearranged(seed), Drawing()).double()


def weigh(output, target):
    return (output * target).sum()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(5, 6), draw(5)


def train(rank, world_size, lent_bytes):
    wire._LENT_BYTES = lent_bytes
    found = []
    for seed in range(CASES):
        pipe = phalanx.Pipeline(
            draw_model(seed), micro_batches=1, schedule="gpipe", balance=[1, 1], loss_fn=weigh, loss_reduction="sum"
        )
        torch.manual_seed(1)
        losses = []
        for step in range(3):
            inputs, target = batch(step)
            losses.append(pipe.step(inputs, target=target).item())
        found.append((losses, {name: parameter.grad for name, parameter in pipe.named_parameters()}))
    return found


@pytest.mark.slow(but=("phalanx-8",))
@pytest.mark.parametrize(("backend", "lent_bytes"), [("phalanx", 8), ("phalanx", 2**20), ("gloo", 2**20)])
def test_a_value_arrives_with_its_strides(backend, lent_bytes):
    """A transposed value arrived contiguous, so Dropout behind the cut dropped other elements than in one process."""
    ranks = run_ranks(train, 2, lent_bytes, backend=backend)
    for seed in range(CASES):
        model = draw_model(seed)
        torch.manual_seed(1)
        losses = []
        for step in range(3):
            inputs, target = batch(step)
            drawn = torch.randint(2**62, ()).item()
            with torch.random.fork_rng():
                torch.manual_seed(drawn)
                loss = weigh(model(inputs), target)
            loss.backward()
            losses.append(loss.item())
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        for found in ranks:
            assert found[seed][0] == pytest.approx(losses, rel=1e-12), seed
        torch.testing.assert_close(ranks[0][seed][1], gradients, rtol=1e-9, atol=1e-12)


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
