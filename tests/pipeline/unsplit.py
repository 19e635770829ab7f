"""Random models, and how they are trained in one process: what a pipeline must give, too."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


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
