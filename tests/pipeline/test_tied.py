"""Gradients of parameters that several stages have, in drawn programs beside one process."""

import random

import torch
from torch import nn
from torch.nn import functional

import phalanx
from phalanx.testing import run_ranks

WORDS, WIDTH, ROWS, STEPS = 7, 4, 8, 5


class Tied(nn.Module):
    """A table of words that the first and the last stage have, each with sparse gradients or with dense ones."""

    def __init__(self, first, last, skipped):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=first)
        self.between = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, WORDS, bias=False) if last is None else nn.Embedding(WORDS, WIDTH, sparse=last)
        self.last.weight = self.words.weight
        self.looks_up = last is not None
        self.end = nn.Linear(WIDTH, WIDTH)
        self.skipped = skipped  # nobody uses the table: its gradient is None

    def forward(self, x):
        hidden = self.between(functional.one_hot(x, WIDTH).float() if self.skipped else self.words(x))
        if self.skipped:
            return self.end(hidden)
        return self.end(hidden + self.last(x)) if self.looks_up else self.last(self.end(hidden))


def draw_program(seed):
    """Return a model, its schedule, and for each step: the frozen parameters, and whether gradients are kept."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Tied(draw.random() < 0.7, draw.choice([True, True, False, None]), False)
    names = [name for name, _ in model.named_parameters() if name != "end.weight"]
    steps = [({n for n in names if draw.random() < 0.3}, draw.random() < 0.5) for _ in range(STEPS)]
    return model, draw.choice(["1f1b", "gpipe", "zero_bubble"]), steps


def draw_batch(step, model):
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(WIDTH, (ROWS,), generator=generator)
    return x, torch.randn(ROWS, WIDTH if model.looks_up else WORDS, generator=generator)


def freeze(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)


def test_tied_gradients_are_those_of_one_process_whatever_is_sparse_or_frozen():
    """A sparse gradient of a tied parameter was an error inside of torch, and what earlier steps had left in `grad` was
    thrown away if the parameter was frozen for a step."""
    seeds = range(8)

    def train(rank, world_size):
        found = []
        for seed in seeds:
            model, schedule, steps = draw_program(seed)
            pipe = phalanx.Pipeline(
                model, micro_batches=2, schedule=schedule, balance=["between.1"], loss_fn=functional.mse_loss
            )
            found.append([])
            for step, (frozen, keeps) in enumerate(steps):
                freeze(pipe, frozen)
                if not keeps:
                    pipe.zero_grad()
                x, y = draw_batch(step, model)
                pipe.step(x, target=y)
                found[-1].append({n: None if p.grad is None else p.grad.clone() for n, p in pipe.named_parameters()})
        return found

    ranks = run_ranks(train, 2)
    layouts = set()
    for seed in seeds:
        model, _, steps = draw_program(seed)
        for step, (frozen, keeps) in enumerate(steps):
            freeze(model, frozen)
            if not keeps:
                model.zero_grad()
            x, y = draw_batch(step, model)
            for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
                (functional.mse_loss(model(part), wanted) / 2).backward()
            for found in ranks:
                assert "words.weight" in found[seed][step]
                for name, gradient in found[seed][step].items():
                    expected = model.get_parameter(name).grad
                    assert (gradient is None) == (expected is None), (seed, step, name)
                    if gradient is not None:
                        layouts.add(gradient.layout)
                        assert gradient.layout == expected.layout, (seed, step, name)
                        torch.testing.assert_close(
                            gradient.to_dense(), expected.to_dense(), msg=f"{seed} {step} {name}"
                        )
    assert layouts == {torch.strided, torch.sparse_coo}
