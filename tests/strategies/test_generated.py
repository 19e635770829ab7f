"""Generated loops train under every strategy as in one process, where the mathematics is the same."""

import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from phalanx import strategies
from phalanx.testing import run_ranks

VOCABULARY, BATCH, EPOCHS = 11, 12, 2

WORDS = [
    ("mirrored", {}),
    ("multi_worker_mirrored", {}),
    ("sharded", {}),
    ("sharded", {"gather_gradients": False}),
    ("sharded", {"shard": "model"}),
    ("pipeline", {"micro_batches": 4}),
]


class Tied(nn.Module):
    """Embedding and head are one parameter; a residual block between them."""

    def __init__(self, width, hidden):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.block = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        hidden = self.embedding(x)
        return self.head(self.norm(hidden + self.block(hidden)))


class Stack(nn.Sequential):
    """Blocks one behind the other."""

    def __init__(self, width, hidden):
        block = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU())
        layers = nn.Embedding(VOCABULARY, width), nn.Linear(width, hidden), nn.ReLU(), block
        super().__init__(*layers, nn.Linear(hidden, VOCABULARY))


@dataclass(frozen=True)
class Loop:
    """A training loop, of which everything that is drawn is here."""

    seed: int
    model: type[nn.Module]
    sizes: tuple[int, int]
    frozen: type[nn.Module] | None
    groups: int
    optimizer: str
    samples: int
    accumulate: int
    max_norm: float | None
    schedule: bool
    precision: str

    @staticmethod
    def draw(seed, world_size):
        chance = random.Random(seed)
        return Loop(
            seed=seed,
            model=chance.choice([Tied, Stack]),
            sizes=(chance.choice([4, 6]), chance.choice([5, 8])),
            frozen=chance.choice([None, None, nn.Embedding, nn.Linear]),
            groups=chance.choice([1, 2, 3]),
            optimizer=chance.choice(["SGD", "momentum", "Adam", "AdamW"]),
            # Of one batch that is not full, of full ones, with a last one that is not; all divide by the ranks.
            samples=chance.choice([world_size, 24, 36, 24 + 2 * world_size]),
            accumulate=chance.choice([1, 1, 2, 3]),
            max_norm=chance.choice([None, 0.3]),
            schedule=chance.choice([True, False]),
            precision=chance.choice(["32-true", "32-true", "bf16-mixed"]),
        )

    def make_model(self):
        torch.manual_seed(self.seed)
        model = self.model(*self.sizes)
        if self.frozen is not None:
            next(one for one in model.modules() if isinstance(one, self.frozen)).weight.requires_grad_(False)
        return model

    def make_optimizer(self, model):
        trained = [one for one in model.parameters() if one.requires_grad]
        groups = [{"params": trained[i :: self.groups], "lr": 0.02 * (i + 1)} for i in range(self.groups)]
        kinds = {
            "SGD": partial(torch.optim.SGD, lr=0.05),
            "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
            "Adam": partial(torch.optim.Adam, lr=0.01),
            "AdamW": partial(torch.optim.AdamW, lr=0.01),
        }
        return kinds[self.optimizer]([one for one in groups if one["params"]])

    def train(self, word, options):
        """The mean losses of the global batches."""
        strategy = strategies.get(word, **options)
        with strategy.scope():
            model = self.make_model()
        _, optimizer = strategy.setup(model, self.make_optimizer(model), F.cross_entropy, precision=self.precision)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if self.schedule else None
        inputs = torch.randint(VOCABULARY, (self.samples,), generator=torch.Generator().manual_seed(self.seed))
        loader = strategy.loader(TensorDataset(inputs, (3 * inputs + 1) % VOCABULARY), BATCH)
        losses = []
        for _ in range(EPOCHS):
            for number, batch in enumerate(loader, start=1):
                is_last = number % self.accumulate == 0 or number == len(loader)
                loss = strategy.compute_gradients(batch, share=1 / self.accumulate, is_last=is_last)
                losses.append(strategy.reduce("mean", loss).item())
                if is_last:
                    strategy.update(self.max_norm)
            if schedule is not None:
                schedule.step()
        strategy.close()
        return losses

    def words(self, world_size):
        """The strategies that can: a pipeline has its micro-batches, each with a sample or more."""
        last = self.samples % BATCH
        piped = self.accumulate == 1 and (not last or last >= 4)
        return [one for one in WORDS if piped or one[0] != "pipeline"]


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("world_size", [2, 3])
def test_generated_loops_train_under_each_strategy_as_in_one_process(world_size, effort, seed):
    loops = [Loop.draw(1000 * world_size + seed + number, world_size) for number in range(effort)]
    alone = [loop.train("single_device", {}) for loop in loops]

    def fn(rank, world_size):
        torch.set_num_threads(1)
        return [{str(word): loop.train(*word) for word in loop.words(world_size)} for loop in loops]

    for seen in run_ranks(fn, world_size, timeout=300 + 10 * effort):
        for loop, expected, by_word in zip(loops, alone, seen, strict=True):
            tolerance = 2e-4 if loop.precision == "32-true" else 2e-2
            for word, losses in by_word.items():
                torch.testing.assert_close(
                    torch.tensor(losses),
                    torch.tensor(expected),
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda words, word=word, loop=loop: f"{word} of {loop}: {words}",
                )
