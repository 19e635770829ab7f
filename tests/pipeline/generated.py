"""Models that dice make: layers, skips, ties, views, inputs and results of all kinds; and their training unsplit."""

from __future__ import annotations

import random
from typing import Any

import torch
from tests.pipeline.unsplit import MiniBatchStatistics
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
_LETTERS = 7


class Scale(nn.Module):
    """A parameter and a constant buffer of its own, used by no matrix product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x):
        return x * self.scale + self.shift


class Pair(nn.Module):
    """Two results, the second of which is a view."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x):
        y = self.b(x)
        return self.a(x).tanh(), y[:, : x.shape[1]]


class Named(nn.Module):
    """A dict with a tensor, None, and a number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x):
        return {"y": self.a(x), "nothing": None, "factor": 0.5}


class Mix(nn.Module):
    """Two inputs, the second of which may be None."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width, bias=False)

    def forward(self, x, other=None):
        return self.a(x) if other is None else self.a(x) * other.tanh()


class Recurrent(nn.Module):
    """An LSTM over two halves of the values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x):
        out, (state, _) = self.lstm(torch.stack([x, x.flip(1)], 1))
        return out[:, 1] + state[0]


class Convolved(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(x[:, None]).mean(1)


class Letters(nn.Module):
    """From integers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_LETTERS, width)

    def forward(self, ids):
        return self.embed(ids)


class Branching(nn.Module):
    """What it does depends on the values, which nobody may follow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.a(x) if x[:, 0].sum() > 0.37 else self.b(x).relu()  # no sum of normalized values, which is zero


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))


LAYERS = {
    "linear": lambda w: nn.Linear(w, w),
    "no_bias": lambda w: nn.Linear(w, w, bias=False),
    "norm": nn.LayerNorm,
    "batch_norm": nn.BatchNorm1d,
    "cumulative": lambda w: nn.BatchNorm1d(w, momentum=None),
    "dropout": lambda w: nn.Dropout(0.3),
    "dropout_in_place": lambda w: nn.Sequential(nn.Linear(w, w), nn.Dropout(0.3, inplace=True)),
    "relu_in_place": lambda w: nn.Sequential(nn.Linear(w, w), nn.ReLU(inplace=True)),
    "bare_in_place": lambda w: nn.LeakyReLU(0.1, inplace=True),
    "gelu": lambda w: nn.GELU(),
    "identity": lambda w: nn.Identity(),
    "scale": Scale,
    "block": _block,
    "recurrent": Recurrent,
    "convolved": Convolved,
    "branching": Branching,
}


class Drawn(nn.Module):
    """Its forward carries out a list of steps on named values, which torch.fx unrolls."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.width = width = draw.randint(2, 5)
        self.layers = nn.ModuleDict()
        self.weight = nn.Parameter(torch.randn(width))
        self.register_buffer("constant", torch.randn(width))
        self.has_ids, self.has_mask = draw.random() < 0.4, draw.random() < 0.4
        self.result = draw.choice(["tensor", "tensor", "tuple", "dict"])
        self.steps: list[tuple[Any, ...]] = []
        names = ["x"]
        if self.has_ids:
            self._add("letters", Letters(width))
            self.steps.append(("module", "letters", "ids", "e"))
            names.append("e")
        for number in range(draw.randint(6, 14)):
            names.append(f"v{number}")
            self._draw_step(draw, names)
        self.last = names[-1]
        self.head = nn.Linear(width, width)
        if draw.random() < 0.3:
            linears = [m for m in self.modules() if isinstance(m, nn.Linear) and m.weight.shape == (width, width)]
            self.head.weight = draw.choice(linears).weight
        self.skipped = draw.choice(names)
        if draw.random() < 0.3:
            frozen = draw.choice([*self.layers.values(), self.head])
            frozen.requires_grad_(False)
        if draw.random() < 0.3:
            self.unused = nn.Linear(2, 2)

    def _add(self, name: str, layer: nn.Module) -> str:
        self.layers[name] = layer
        return name

    def _draw_step(self, draw: random.Random, names: list[str]) -> None:
        made, width, source = names[-1], self.width, names[-2]
        earlier = draw.choice(names[:-1])
        kind = draw.choices(
            [
                "layer",
                "again",
                "pair",
                "named",
                "mix",
                "add",
                "cat",
                "view",
                "root",
                "ids",
                "in_place",
                "detach",
                "none",
            ],
            [16, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1],
        )[0]
        if kind == "again":
            plain = [n for n, m in self.layers.items() if isinstance(m, (nn.Linear, nn.LayerNorm, nn.Sequential))]
            plain = [n for n in plain if not any(isinstance(m, nn.ReLU) for m in self.layers[n].modules())]
            if not plain:
                kind = "layer"
            else:
                self.steps.append(("module", draw.choice(plain), source, made))
        if kind == "layer":
            name = self._add(made, LAYERS[draw.choice(list(LAYERS))](width))
            if draw.random() < 0.15 and isinstance(self.layers[name], nn.Linear):
                others = [m for n, m in self.layers.items() if isinstance(m, nn.Linear) and n != name]
                if others:
                    self.layers[name].weight = draw.choice(others).weight
            self.steps.append(("module", name, source, made))
        elif kind in ("pair", "named"):
            self._add(made, (Pair if kind == "pair" else Named)(width))
            self.steps.append((kind, made, source, made))
        elif kind in ("mix", "none"):
            self._add(made, Mix(width))
            self.steps.append(("mix", made, source, made, earlier if kind == "mix" else None))
        elif kind != "again":
            self.steps.append((kind, source, made, earlier))

    def forward(self, x, ids=None, mask=None, *, factor: float = 1.0):
        values = {"x": x, "ids": ids}
        for kind, *rest in self.steps:
            if kind in ("module", "pair", "named", "mix"):
                name, source, made, *other = rest
                layer, given = self.layers[name], values[source]
                if kind == "module":
                    values[made] = layer(given)
                elif kind == "pair":
                    first, second = layer(given)
                    values[made] = first + second
                elif kind == "named":
                    found = layer(given)
                    values[made] = found["y"] * found["factor"]
                else:
                    values[made] = layer(given, None if other[0] is None else values[other[0]])
                continue
            source, made, earlier = rest
            a, b = values[source], values[earlier]
            if kind == "add":
                values[made] = a + b * 0.5
            elif kind == "cat":
                values[made] = torch.cat([a, b], 1).chunk(2, 1)[0] + b
            elif kind == "view":
                values[made] = a.unsqueeze(1).transpose(1, 2).reshape(-1, self.width)
            elif kind == "root":
                values[made] = a * self.weight + self.constant
            elif kind == "ids":
                values[made] = a + functional.one_hot(b.argmax(1), self.width)
            elif kind == "in_place":
                values[made] = (a + 0).mul_(0.9).add_(0.1)
            else:
                values[made] = a + b.detach()
        y = values[self.last]
        if mask is not None:
            y = y * mask
        y = self.head(y) * factor
        if self.result == "tuple":
            return y, (values[self.skipped].sum(1), None)
        if self.result == "dict":
            return {"y": y, "kinds": y.argmax(1), "more": [values[self.skipped], 3]}
        return y


def loss_of(output, target):
    if isinstance(output, tuple):
        return functional.mse_loss(output[0], target) + 0.1 * output[1][0].square().mean()
    if isinstance(output, dict):
        return functional.mse_loss(output["y"], target) + 0.1 * output["more"][0].square().mean()
    return functional.mse_loss(output, target)


def draw_generated(seed: int):
    """The model, in double precision so that a wrong gradient is no rounding, and its loss."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    return Drawn(draw).double()


def draw_batch(model: Drawn, seed: int, rows: int):
    """Arguments of forward, keywords, and the target."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, model.width, generator=generator, dtype=torch.float64)
    ids = torch.randint(_LETTERS, (rows,), generator=generator) if model.has_ids else None
    given = {"mask": x.sigmoid()} if model.has_mask else {}
    return (x, *([] if ids is None else [ids])), given, x.flip(0).contiguous()


def draw_case(seed: int, world_size: int) -> dict[str, Any]:
    """How it is trained."""
    draw = random.Random(seed)
    replicas = 2 if world_size == 4 and draw.random() < 0.5 else 1
    ranks = world_size // replicas
    schedule = draw.choice(SCHEDULES)
    micro_batches = draw.choice([n for n in (1, 2, 3, 5, 6) if schedule == "gpipe" or n >= ranks])
    return {
        "seed": seed,
        "schedule": schedule,
        "micro_batches": micro_batches,
        "replicas": replicas,
        "sharded": replicas > 1 and draw.random() < 0.7,
        "checkpoint": draw.choice(["never", "never", "except_last", "always"]),
        "optimizer": draw.choice(["SGD", "AdamW"]),
        "balance": draw.choice(["size", "size", "drawn", "time"]),
        "rows": [draw.randint(2 * micro_batches, 4 * micro_batches + 1) for _ in range(3)],
        "clips": draw.random() < 0.3,
        "accumulates": draw.random() < 0.3,
        "outputs": draw.choice(["last", "all"]),
    }


def make_optimizer(name: str, parameters: Any) -> Any:
    # Where a gradient is nothing but rounding (a bias before a norm), Adam would make steps of it.
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.02, "eps": 1e-3}
    return getattr(torch.optim, name), options, list(parameters)


def train_generated_unsplit(case: dict[str, Any]) -> dict[str, Any]:
    """What a pipeline must give, too: losses, gradients, weights, the result of an evaluation."""
    model = draw_generated(case["seed"])
    kind, options, parameters = make_optimizer(case["optimizer"], model.parameters())
    optimizer = kind(parameters, **options)
    replicas, losses, norms = case["replicas"], [], []
    states = []
    for replica in range(replicas):
        torch.manual_seed(7 + replica)
        states.append(torch.get_rng_state())
    for step, rows in enumerate(case["rows"]):
        if not (case["accumulates"] and step == 1):
            optimizer.zero_grad()
        statistics = MiniBatchStatistics(model)
        losses.append(torch.zeros((), dtype=torch.float64))
        for replica in range(replicas):
            torch.set_rng_state(states[replica])
            random_seed = torch.randint(2**62, ()).item()
            states[replica] = torch.get_rng_state()
            args, given, target = draw_batch(model, step * 10 + replica, rows)
            pieces = min(case["micro_batches"], rows)
            cut = [a.tensor_split(pieces) for a in args]
            cut_given = {name: value.tensor_split(pieces) for name, value in given.items()}
            for i, expected in enumerate(target.tensor_split(pieces)):
                torch.manual_seed(random_seed + i)
                with statistics:
                    output = model(*(a[i] for a in cut), **{name: v[i] for name, v in cut_given.items()})
                loss = loss_of(output, expected) * (len(expected) / rows / replicas)
                loss.backward()
                losses[-1] += loss.detach()
        statistics.end()
        if case["clips"]:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).float())
        if not (case["accumulates"] and step == 0):
            optimizer.step()
    model.eval()
    args, given, _ = draw_batch(model, 99, 9)
    pieces = range(min(case["micro_batches"], 9))  # a layer may do other things with another number of samples
    cut = [a.tensor_split(len(pieces)) for a in args]
    cut_given = {name: value.tensor_split(len(pieces)) for name, value in given.items()}
    with torch.no_grad():
        outputs = [model(*(a[i] for a in cut), **{name: v[i] for name, v in cut_given.items()}) for i in pieces]
    output = tree_map(lambda *values: torch.cat(values) if isinstance(values[0], torch.Tensor) else values[0], *outputs)
    gradients = {name: None if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "output": output, "gradients": gradients, "state": model.state_dict()}
