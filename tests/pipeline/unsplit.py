"""Random models, and how they are trained in one process: what a pipeline must give, too."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional


class Convolutional(nn.Module):
    """Convolutions whose results go on to layers far behind them."""

    def __init__(self, width: int, depth: int, dropout: float, normalize: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) if normalize else nn.Identity() for _ in range(depth))
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(depth))
        self.drop = nn.Dropout2d(dropout)
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        kept = []
        for layer, norm in zip(self.down, self.norms, strict=True):
            kept.append(x)
            x = norm(layer(x)).relu()
        for layer in self.up:
            x = self.drop(functional.relu(layer(torch.cat([x, kept.pop()], 1)), inplace=True))
        return self.head(x.mean((2, 3)) * self.scale)


class Block(nn.Module):
    """A layer of a transformer, with causal attention."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        q, k, v = self.mix(self.norm1(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Letters in, the next letters out; the embedding may be the output layer, too."""

    def __init__(self, letters: int, width: int, depth: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.position = nn.Parameter(torch.randn(6, width) / 10)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, letters):
        x = self.embed(letters) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def letters_loss(output, target):
    return functional.cross_entropy(output, target.flatten())


def draw_model(seed: int):
    """A model, its loss, and a mini-batch: inputs and targets."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows = draw.randint(16, 25)  # so that no micro-batch of 8 is a single sample, which BatchNorm refuses
    dropout = draw.choice([0.0, 0.3])
    kind = draw.choice(["perceptron", "convolutional", "transformer"])
    if kind == "perceptron":
        width = draw.randint(3, 7)
        norm = draw.choice([nn.BatchNorm1d, nn.LayerNorm, nn.Identity])
        layers = [
            nn.Sequential(nn.Linear(width, width), norm(width), draw.choice([nn.Tanh(), nn.ReLU(inplace=True)]))
            for _ in range(draw.randint(4, 6))
        ]
        model = nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(width, 2))
        return model, functional.mse_loss, torch.randn(rows, width), torch.randn(rows, 2)
    if kind == "convolutional":
        model = Convolutional(draw.randint(2, 4), draw.randint(2, 3), dropout, draw.choice([True, False]))
        return model, functional.cross_entropy, torch.randn(rows, 2, 5, 5), torch.randint(3, (rows,))
    model = Transformer(11, 8, draw.randint(2, 4), dropout, draw.choice([True, False]))
    return model, letters_loss, torch.randint(11, (rows, 6)), torch.randint(11, (rows, 6))


def train_unsplit(seed: int, micro_batches: int, steps: int):
    """Losses, the result of an evaluation, gradients of the last step, and the trained model's state."""
    model, loss_fn, inputs, targets = draw_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        random_seed = torch.randint(2**62, ()).item()
        state = torch.get_rng_state()
        losses.append(torch.zeros(()))
        norms = MiniBatchStatistics(model)
        for i, (x, y) in enumerate(
            zip(inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches), strict=True)
        ):
            torch.manual_seed(random_seed + i)
            with norms:
                loss = loss_fn(model(x), y) * (len(x) / len(inputs))
            loss.backward()
            losses[-1] += loss.detach()
        norms.end()
        torch.set_rng_state(state)
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        return losses, model(inputs), gradients, model.state_dict()


class MiniBatchStatistics:
    """Lets BatchNorm layers track the statistics of all values that they saw in a mini-batch, by keeping the values."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._seen = {layer: [] for layer in self._layers}
        self._buffers = {layer: [b.clone() for b in layer.buffers()] for layer in self._layers}

    def __enter__(self):
        self._hooks = [
            layer.register_forward_pre_hook(lambda layer, args: self._seen[layer].append(args[0].detach().clone()))
            for layer in self._layers
        ]

    def __exit__(self, *exc):
        for hook in self._hooks:
            hook.remove()

    def end(self):
        for layer in self._layers:
            values = torch.cat(self._seen[layer]).transpose(0, 1).flatten(1)
            mean, var, count = self._buffers[layer]
            share = 1 / (count.item() + 1) if layer.momentum is None else layer.momentum
            with torch.no_grad():
                layer.running_mean.copy_(mean.lerp(values.mean(1), share))
                layer.running_var.copy_(var.lerp(values.var(1), share))
                layer.num_batches_tracked.copy_(count + 1)
