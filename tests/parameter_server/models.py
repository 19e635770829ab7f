"""A model on servers and its training, in one process and on ranks."""

from functools import partial

import torch
import torch._dynamo  # every optimizer loads it: once here, and not once in each worker
from tests.parameter_server.trainers import TRAINERS

import phalanx

CASES = [
    (torch.optim.SGD, torch.optim.SGD, {"lr": 0.1}, {"lr": 0.5}),
    (partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01), torch.optim.SparseAdam, {"lr": 0.1}, {"lr": 0.05}),
    (torch.optim.Adam, torch.optim.SparseAdam, {"lr": 0.01}, {"lr": 0.01}),
    (torch.optim.AdamW, torch.optim.Adagrad, {"lr": 0.01}, {"lr": 0.1}),
    (torch.optim.Adafactor, partial(torch.optim.SGD, momentum=0.5), {"lr": 0.01}, {"lr": 0.1}),
]


class Model(torch.nn.Module):
    """Two tables, and a network over rows of them."""

    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            dim, hidden = 1 + seed % 5, 3 + seed % 4
            self.one = torch.nn.Embedding(5 + 7 * seed % 11, dim, sparse=True)
            self.other = torch.nn.Embedding(2 + seed, dim, sparse=True)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(2 * dim, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1)
            )

    def batch(self, seed):
        """Ids with repeats, and what to learn."""
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(len(table.weight), (8,), generator=generator) for table in (self.one, self.other)]
        return *ids, torch.randn(8, 1, generator=generator)


def loss_of(net, one, other, target):
    return (net(torch.cat([one, other], 1)) - target).square().mean()


def train_alone(model, case, steps):
    """One process that adds the gradients of the trainers' parts, in their order."""
    make, make_rows, options, row_options = case
    tables = [model.one.weight, model.other.weight]
    optimizers = [make(model.net.parameters(), **options), make_rows(tables, **row_options)]
    for step in steps:
        totals = [None] * len(list(model.parameters()))
        for trainer in range(2):
            one, other, target = model.batch(2 * step + trainer)
            loss = loss_of(model.net, model.one(one), model.other(other), target)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            grads = [g.coalesce() if g.is_sparse else g for g in grads]
            totals = [g if t is None else t + g for t, g in zip(totals, grads, strict=True)]
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total / 2
        for optimizer in optimizers:
            optimizer.step()


def make_server(model, case, servers, **options):
    make, make_rows, dense_options, row_options = case
    return phalanx.ParameterServer(
        servers,
        TRAINERS,
        dense=dict(model.net.named_parameters()),
        tables={"one": model.one.weight, "other": model.other.weight},
        optimizer=partial(make, **dense_options),
        row_optimizer=partial(make_rows, **row_options),
        **options,
    )


def train(server, model, number, steps):
    names = [name for name, _ in model.net.named_parameters()]
    for step in steps:
        one, other, target = model.batch(2 * step + number)
        pulled = server.pull({"one": one, "other": other})
        net = partial(torch.func.functional_call, model.net, {name: pulled[name] for name in names})
        loss_of(lambda x, net=net: net((x,)), pulled["one"], pulled["other"], target).backward()
        server.push(pulled)


def check_equal(state, model):
    for name, parameter in model.net.named_parameters():
        assert torch.equal(state["dense"][name], parameter), name
    assert torch.equal(state["tables"]["one"], model.one.weight)
    assert torch.equal(state["tables"]["other"], model.other.weight)
