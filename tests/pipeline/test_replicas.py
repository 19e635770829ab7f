"""Replicas of a pipeline stay one model: drawn programs beside one process on the same global batch."""

import contextlib
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import phalanx
from phalanx.testing import run_ranks

WIDTH, WORDS, ROWS = 4, 7, 8


def draw_frozen_schedule(seed, names, steps):
    """Return for each step the names of the parameters that are frozen in it, and whether gradients are kept."""
    draw = random.Random(seed)
    return [({name for name in names if draw.random() < 0.4}, draw.random() < 0.3) for _ in range(steps)]


def freeze(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)


def draw_words(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (ROWS,), generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def draw_model(seed):
    """Return a model whose first layer has sparse gradients, or dense ones."""
    torch.manual_seed(seed)
    first = nn.Embedding(WORDS, WIDTH, sparse=seed % 3 != 0)
    return nn.Sequential(first, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def dense(gradient):
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def test_replicas_average_frozen_and_sparse_parameters_as_one_process_does():
    """A parameter that was frozen when the Pipeline was made was never averaged afterwards, and replicas drifted
    apart; a sparse gradient was an error inside of torch, after which the process group was gone."""
    seeds, steps = range(5), 4

    def train(rank, world_size):
        mesh = phalanx.mesh(pipeline=2, data=2)
        data = mesh.get_local_rank("data")
        found = []
        for seed in seeds:
            model = draw_model(seed)
            schedule = draw_frozen_schedule(seed, [name for name, _ in model.named_parameters()], steps)
            freeze(model, schedule[0][0])
            pipe = phalanx.Pipeline(model, micro_batches=2, balance=[2, 2], mesh=mesh, loss_fn=functional.mse_loss)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3)
            gradients = []
            for step, (frozen, keeps) in enumerate(schedule):
                freeze(pipe, frozen)
                if not keeps:
                    pipe.zero_grad()
                x, y = draw_words(step)
                if any(p not in frozen for p, _ in model.named_parameters()):
                    pipe.step(x[data::2], target=y[data::2])
                gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in pipe.named_parameters()})
                optimizer.step()
            found.append((gradients, pipe.state_dict()))
        return found

    ranks = run_ranks(train, 4)
    for seed in seeds:
        model = draw_model(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        schedule = draw_frozen_schedule(seed, [name for name, _ in model.named_parameters()], steps)
        for step, (frozen, keeps) in enumerate(schedule):
            freeze(model, frozen)
            if not keeps:
                model.zero_grad()
            x, y = draw_words(step)
            if any(p not in frozen for p, _ in model.named_parameters()):
                functional.mse_loss(model(x), y).backward()
            for found in ranks:
                for name, gradient in found[seed][0][step].items():
                    expected = model.get_parameter(name).grad
                    assert (gradient is None) == (expected is None), (seed, step, name)
                    if gradient is not None:
                        assert gradient.layout == expected.layout, (seed, step, name)
                        torch.testing.assert_close(dense(gradient), dense(expected), msg=f"{seed} {step} {name}")
            optimizer.step()
        for found in ranks:
            torch.testing.assert_close(dict(found[seed][1]), dict(model.state_dict()))
            assert all(found[seed][1][name].equal(ranks[0][seed][1][name]) for name in model.state_dict())


class Running(nn.Module):
    """A layer that subtracts a running mean, which it keeps in one of the ways that are in use."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("table", torch.ones(1).expand(3))  # it never changes, and is not in memory as it looks
        self.register_buffer("none", None)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                mean = 0.9 * self.mean + 0.1 * x.mean(0)
                if self.way == "in place":
                    self.mean.copy_(mean)
                elif self.way == "data":
                    self.mean.data.copy_(mean)
                else:
                    self.mean = mean
            self.count += 1
        return x - self.mean + self.count


class NormAlike(nn.BatchNorm1d):
    """A BatchNorm whose forward is its own, so that a Pipeline does not see to its running statistics."""

    def forward(self, x):
        return super().forward(2 * x)


def draw_running(way):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Running(way), nn.Linear(WIDTH, WIDTH), NormAlike(WIDTH), Running(way),
        nn.Linear(WIDTH, WIDTH),
    ).double()  # fmt: skip


def train_replicas_in_turn(way, steps):
    """Train two replicas as DistributedDataParallel does, in one process: the first one's buffers are for both."""
    replicas = [draw_running(way), draw_running(way)]
    for step in range(steps):
        x, y = draw_rows(step)
        for at, model in enumerate(replicas):
            for part, wanted in zip(x[at::2].chunk(2), y[at::2].chunk(2), strict=True):
                (functional.mse_loss(model(part), wanted) / 2).backward()
        means = [sum(p.grad for p in both) / 2 for both in zip(*(m.parameters() for m in replicas), strict=True)]
        for model in replicas:
            with torch.no_grad():
                for parameter, mean in zip(model.parameters(), means, strict=True):
                    parameter -= 0.1 * mean
                for (name, mine), first in zip(model.named_buffers(), replicas[0].buffers(), strict=True):
                    if not name.endswith("table"):
                        mine.copy_(first)
            model.zero_grad()
    return replicas[0]


@contextlib.contextmanager
def watched_broadcasts():
    """Yield a list of the numbers of elements that this rank broadcasts in the block."""
    sent, broadcast = [], dist.broadcast

    def watch(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return broadcast(tensor, *args, **kwargs)

    dist.broadcast = watch
    try:
        yield sent
    finally:
        dist.broadcast = broadcast


def draw_rows(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64).unbind()


@pytest.mark.slow
def test_buffers_that_a_step_changes_are_the_first_replicas_on_all():
    """Each replica kept its own running mean, so that replicas were different models."""
    ways, steps = ("in place", "data", "replaced"), 3

    def train(rank, world_size):
        mesh = phalanx.mesh(pipeline=2, data=2)
        data = mesh.get_local_rank("data")
        found = []
        for way in ways:
            pipe = phalanx.Pipeline(
                draw_running(way), micro_batches=2, balance=[3, 3], mesh=mesh, loss_fn=functional.mse_loss
            )
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            with watched_broadcasts() as sent:
                for step in range(steps):
                    x, y = draw_rows(step)
                    pipe.zero_grad()
                    pipe.step(x[data::2], target=y[data::2])
                    optimizer.step()
            pipe.eval()
            found.append((pipe.state_dict(), dict(pipe.named_buffers()), sent))
        return found

    ranks = run_ranks(train, 4)
    for at, way in enumerate(ways):
        expected = train_replicas_in_turn(way, steps)
        for found in ranks:
            state, buffers, sent = found[at]
            replicas = [rank for rank in range(4) if ranks[rank][at][1].keys() == buffers.keys()]
            torch.testing.assert_close(dict(state), dict(expected.state_dict()), msg=lambda text: f"{way}: {text}")  # noqa: B023
            assert all(buffer.equal(ranks[rank][at][1][name]) for name, buffer in buffers.items() for rank in replicas)
            # a mean and a count, and on the second stage the statistics of the norm; the tables are not sent
            assert sent == [24 * WIDTH + 16 if "3.running_mean" in buffers else 8 * WIDTH + 8] * steps
