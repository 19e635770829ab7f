"""Random models, optimizers and settings, trained apart on real ranks, against the papers' formulas in one process."""

import io
import random
from dataclasses import dataclass

import pytest
import torch
from tests.comparisons import assert_equal
from tests.optim import averaging
from tests.optim.averaging import KINDS
from tests.optim.replicas import floats
from torch import nn

from phalanx.testing import run_ranks


class Network(nn.Module):
    """Of random layers: with tied weights, parameters without gradients or out of use, a buffer that is bound anew."""

    def __init__(self, draw):
        super().__init__()
        width = draw.randint(2, 6)
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=draw.random() < 0.7) for _ in range(draw.randint(1, 3))
        )
        self.norm = draw.choice([nn.Identity, nn.LayerNorm])(width)
        self.is_tied = draw.random() < 0.3
        if self.is_tied:
            self.layers.append(self.layers[0])
        if draw.random() < 0.3:
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        if draw.random() < 0.3:
            self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(self.norm(x)))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # another tensor each time
        self.count += 1
        return (x - self.mean) * self.scale


@dataclass(frozen=True)
class Task:
    """What is trained, all of it drawn by `seed`."""

    seed: int

    def model(self):
        torch.manual_seed(self.seed)
        return Network(random.Random(self.seed)).double()

    def _optimizer_of(self, model, word, makes):
        """Over one to three groups of parameters, each with a learning rate of its own."""
        draw = random.Random(f"{self.seed} {word}")
        parameters = [p for p in model.parameters() if p.requires_grad or draw.random() < 0.5]
        num = draw.randint(1, min(3, len(parameters)))
        groups = [{"params": parameters[i::num], "lr": draw.choice([0.01, 0.03, 0.1])} for i in range(num)]
        return draw.choice(makes)(groups)

    def inner_of(self, model):
        return self._optimizer_of(
            model,
            "inner",
            [
                lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
                lambda groups: torch.optim.SGD(groups, weight_decay=0.01),
                lambda groups: torch.optim.AdamW(groups, eps=1e-4),
                lambda groups: torch.optim.RMSprop(groups, eps=1e-4),
            ],
        )

    def outer_of(self, model):
        return self._optimizer_of(
            model,
            "outer",
            [
                lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
                lambda groups: torch.optim.SGD([{**group, "lr": 1.0} for group in groups]),
                lambda groups: torch.optim.SGD(groups, momentum=0.5, weight_decay=0.01),
                lambda groups: torch.optim.Adam(groups, eps=1e-4),
            ],
        )

    def train_step(self, model, optimizer, rank, step):
        """Over one to three batches; some steps are skipped before, as a GradScaler does it."""
        draw = random.Random(f"{self.seed} {rank} {step}")
        torch.manual_seed(draw.randrange(1 << 30))
        for _ in range(draw.choice([1, 1, 2])):
            optimizer.zero_grad()
            for _ in range(draw.randint(1, 3)):
                model(torch.randn(4, model.mean.numel(), dtype=torch.float64)).square().mean().backward()
        optimizer.step()


@dataclass(frozen=True)
class Case:
    """`cuts`: how many steps each rank has taken when it is saved; all have held as many rounds then."""

    kind: str
    task: Task
    options: dict
    steps_of: tuple
    cuts: tuple

    def start(self, model=None):
        model = model or self.task.model()
        inner, outer = self.task.inner_of(model), self.task.outer_of(model)
        return model, inner, KINDS[self.kind](model, inner, outer, **self.options)

    def simulate(self):
        return getattr(averaging, f"simulate_{self.kind}")(self.steps_of, self.options["sync_every"], task=self.task)


def generate(kind, world_size, number):
    draw = random.Random(f"{kind} {world_size} {number}")
    task = Task(draw.randrange(1 << 30))
    options = {"sync_every": draw.randint(1, 5)}
    window = options["sync_every"]
    if kind == "diloco":
        options["backup_device"] = draw.choice([None, "cpu"])
    if draw.random() < 0.4:
        steps_of = [draw.randint(1, 14)] * world_size
    else:
        steps_of = [draw.randint(0, 14) for _ in range(world_size)]
    first = draw.randint(0, min(steps_of)) // window * window
    cuts = tuple(min(steps, first + draw.randrange(window)) for steps in steps_of)
    return Case(kind, task, options, tuple(steps_of), cuts)


@pytest.mark.slow(but=("3-phalanx",))
@pytest.mark.parametrize(
    ("world_size", "backend"), [(1, "phalanx"), (2, "gloo"), (3, "phalanx"), (4, "phalanx"), (5, "gloo")]
)
def test_what_is_trained_apart_is_what_the_papers_say_and_goes_on_from_what_was_saved(world_size, backend, effort):
    """To rounding the former, bit for bit the latter, and what all have at the end."""
    cases = [generate(kind, world_size, number) for number in range(effort) for kind in KINDS]

    def train(case, rank, model, inner, steps):
        for step in steps:
            case.task.train_step(model, inner, rank, step)

    def fn(rank, world_size):
        results = []
        for case in cases:
            model = case.task.model()
            for parameter in model.parameters():
                parameter.data += rank  # rank 0's values become everybody's
            model, inner, rounds = case.start(model)
            with rounds:
                train(case, rank, model, inner, range(case.steps_of[rank]))
            results.append(floats(model))

            model, inner, rounds = case.start()
            train(case, rank, model, inner, range(case.cuts[rank]))
            file = io.BytesIO()
            torch.save([one.state_dict() for one in (model, inner, rounds)], file)
            again = case.start()
            file.seek(0)
            for one, state in zip(again, torch.load(file, weights_only=True), strict=True):
                one.load_state_dict(state)
            model, inner, rounds = again
            with rounds:
                train(case, rank, model, inner, range(case.cuts[rank], case.steps_of[rank]))
            assert_equal(floats(model), results[-1], case)
        return results

    ended = run_ranks(fn, world_size, backend=backend, timeout=300 + 20 * effort)
    for number, case in enumerate(cases):
        for values in ended:
            assert_equal(values[number], ended[0][number], case)
        torch.testing.assert_close(
            ended[0][number], case.simulate(), rtol=1e-7, atol=1e-8, msg=lambda m, c=case: f"{c}: {m}"
        )
