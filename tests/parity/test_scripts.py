"""Loops as articles and other people's repositories write them: the losses and weights that torch's DDP has over Gloo.

All of them run in one group, one after the other, over PyTorch's wrapper and over ours. One of them found what
no test had: small gradients that a user keeps were overwritten by the next backward (`gradients_that_are_kept`).
"""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.parity.beside_gloo import compare
from tests.small_models import mlp
from tests.training import copy_parameters, copy_state
from torch import nn
from torch.nn.utils import parametrizations

import phalanx
from phalanx.testing import run_ranks

SCRIPTS = []


def script(fn):
    SCRIPTS.append(fn)
    return fn


def perceptron():
    return mlp((8, 16, 4))


def batches(number, *shape):
    random = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(*shape, generator=random) for _ in range(number)]


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@script
def two_networks_against_each_other(DDP):
    torch.manual_seed(0)
    generator = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    critic = DDP(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    steps = [torch.optim.Adam(net.parameters(), 2e-3, betas=(0.5, 0.999)) for net in (generator, critic)]
    losses = []
    for real, noise in zip(batches(5, 6, 8), batches(5, 6, 4), strict=True):
        critic.zero_grad()
        fake = generator(noise)
        F.softplus(-critic(real)).mean().backward()
        F.softplus(critic(fake.detach())).mean().backward()
        steps[1].step()
        losses.append(step(steps[0], F.softplus(-critic(fake)).mean()))
    return losses, copy_state(generator), copy_state(critic)


@script
def a_gradient_penalty(DDP):
    critic = DDP(perceptron())
    optimizer = torch.optim.Adam(critic.parameters(), 1e-2)
    losses = []
    for x in batches(4, 6, 8):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        losses.append(step(optimizer, critic(x).mean() + 10 * (slope.norm(2, 1) - 1).square().mean()))
    return losses, copy_state(critic)


@script
def accumulation_by_an_attribute_with_tied_weights(DDP):
    class Letters(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.place = nn.Embedding(30, 16), nn.Parameter(torch.zeros(16, 16))
            self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, 30, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            h = self.embed(x) + self.place[: x.shape[1]].unsqueeze(0)
            return self.head(h + F.gelu(self.mix(h)))

    torch.manual_seed(0)
    model = DDP(Letters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    random = torch.Generator().manual_seed(dist.get_rank())
    norms = []
    for i in range(9):
        model.require_backward_grad_sync = i % 3 == 2  # as nanoGPT does it
        x = torch.randint(0, 30, (1, 12), generator=random)
        (F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()) / 3).backward()
        if i % 3 == 2:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return norms, copy_state(model)


@script
def a_recurrent_network_that_keeps_its_state(DDP):
    torch.manual_seed(0)
    model = DDP(nn.LSTM(8, 8, 2, batch_first=True))
    state, losses = (torch.zeros(2, 3, 8), torch.zeros(2, 3, 8)), []
    for x in batches(4, 3, 7, 8):
        model.zero_grad()
        out, state = model(x, tuple(part.detach() for part in state))
        loss = F.mse_loss(out, x)
        loss.backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.5)
        losses.append(loss.item())
    return losses, copy_state(model)


@script
def embeddings_of_all_ranks_contrasted(DDP):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x)
            return tuple(parts)

        @staticmethod
        def backward(ctx, *gradients):
            stacked = torch.stack(gradients)
            dist.all_reduce(stacked)
            return stacked[dist.get_rank()]

    model = DDP(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x in batches(3, 4, 8):
        mine = F.normalize(model(x), dim=1)
        alike = mine @ torch.cat(Gather.apply(mine)).T
        losses.append(step(optimizer, F.cross_entropy(alike / 0.5, torch.arange(4) + 4 * dist.get_rank())))
    return losses, copy_state(model)


@script
def a_queue_in_buffers(DDP):
    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = perceptron()
            self.register_buffer("queue", torch.ones(10, 4))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, x):
            z, place = self.net(x), int(self.place)
            keys = [torch.empty_like(z) for _ in range(dist.get_world_size())]
            dist.all_gather(keys, z.detach())
            self.queue[place : place + len(keys)] = torch.cat(keys)[: 10 - place]
            self.place[0] = (place + len(keys)) % 10
            return z @ self.queue.clone().T

    model = DDP(Queue())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return [step(optimizer, model(x).square().mean()) for x in batches(6, 1, 8)], copy_state(model)


@script
def a_closure_that_is_called_again(DDP):
    model = DDP(perceptron())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    (x,), losses = batches(1, 16, 8), []

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :4])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        return mean / dist.get_world_size()

    for _ in range(2):
        optimizer.step(closure)
    return losses, copy_state(model)


@script
def two_backwards_for_a_step(DDP):
    model = DDP(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches(3, 4, 8):  # sharpness-aware minimization
        model(x).square().mean().backward()
        before = copy_parameters(model)
        norm = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in model.parameters()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05 / norm)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
    return copy_state(model)


@script
def two_forwards_and_a_frozen_teacher(DDP):
    teacher, student = perceptron().eval().requires_grad_(False), DDP(perceptron())
    average = copy.deepcopy(student.module).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    losses = []
    for x in batches(4, 4, 8):
        a, b = student(x), student(x.flip(0))
        target = teacher(x + 0.1).softmax(1)
        alike = F.cosine_similarity(a, b).mean()
        losses.append(step(optimizer, F.kl_div(a.log_softmax(1), target, reduction="batchmean") - alike))
        with torch.no_grad():
            for old, new in zip(average.parameters(), student.module.parameters(), strict=True):
                old.lerp_(new, 0.1)
    return losses, copy_state(student), copy_state(average)


@script
def gradients_that_are_kept(DDP):
    model, kept = DDP(perceptron()), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches(4, 4, 8):
        model(x).square().mean().backward()
        kept.append([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return kept, copy_state(model)


@script
def parameters_of_every_kind(DDP):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.wave = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))
            self.fine, self.coarse = nn.Linear(8, 8).double(), nn.Linear(8, 8).bfloat16()
            self.norm = parametrizations.weight_norm(nn.Linear(8, 8))
            self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
            self.turned = nn.Parameter(torch.randn(4, 8).t())

        def forward(self, x):
            h = (torch.fft.fft(x) @ self.wave).abs()
            h = self.norm(self.coarse(self.fine(h.double()).bfloat16()).float())
            return h @ self.turned * self.scale + self.none.sum()

    torch.manual_seed(0)
    model = DDP(Mixture())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    losses = [step(optimizer, model(x).square().mean()) for x in batches(3, 4, 8)]
    return losses, [torch.view_as_real(p).clone() if p.is_complex() else p.clone() for p in copy_state(model).values()]


@script
def a_metric_in_flight_during_backward(DDP):
    model = DDP(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    means = []
    for x in batches(40, 4, 8):
        loss = model(x).square().mean()
        mean = loss.detach().clone()
        flying = dist.all_reduce(mean, async_op=True)
        step(optimizer, loss)
        flying.wait()
        means.append(mean.item())
    return means, copy_state(model)


def _all(rank, world_size, ours):
    DDP = phalanx.DistributedDataParallel if ours else nn.parallel.DistributedDataParallel
    return {fn.__name__: fn(DDP) for fn in SCRIPTS}


@pytest.fixture(scope="module")
def over_gloo():
    return run_ranks(_all, 2, False, backend="gloo")


@pytest.mark.slow(but=("ours",))
@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
def test_scripts_of_others_give_the_numbers_that_they_have_over_gloo(over_gloo, ours):
    for mine, reference in zip(run_ranks(_all, 2, ours), over_gloo, strict=True):
        for name in mine:
            try:
                compare(mine[name], reference[name], 0.0)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
