"""The three models of the question: one bound by memory, one mixed, one with many small layers and buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model, its input for one rank, and its loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 3072), nn.ReLU(), nn.Linear(3072, 3072), nn.ReLU(),
        nn.Linear(3072, 3072), nn.ReLU(), nn.Linear(3072, 1024),
    )  # fmt: skip


class Transformer(nn.Module):
    """A character-level language model of 10 million parameters."""

    vocabulary, width, length = 256, 320, 64

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocabulary, self.width)
        self.positions = nn.Parameter(torch.zeros(self.length, self.width))
        layer = nn.TransformerEncoderLayer(
            self.width, nhead=8, dim_feedforward=4 * self.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=8, enable_nested_tensor=False)
        self.head = nn.Linear(self.width, self.vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(self.length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True)).transpose(1, 2)


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        inside = channels * stride
        self.body = nn.Sequential(
            nn.Conv2d(channels, inside, 3, stride, padding=1, bias=False), nn.BatchNorm2d(inside), nn.ReLU(),
            nn.Conv2d(inside, inside, 3, padding=1, bias=False), nn.BatchNorm2d(inside),
        )  # fmt: skip
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(channels, inside, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.body(inputs) + self.skip(inputs))


def _resnet() -> nn.Module:
    stages: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for channels, stride in ((16, 1), (16, 1), (16, 2), (32, 1), (32, 2), (64, 1)):
        stages.append(Residual(channels, stride))
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _vectors(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 1024, generator=generator), torch.randn(8, 1024, generator=generator)


def _characters(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(Transformer.vocabulary, (4, Transformer.length + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def _images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 32, 32, generator=generator), torch.randint(10, (16,), generator=generator)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("perceptron", _perceptron, _vectors, nn.functional.mse_loss),
        Workload("transformer", Transformer, _characters, nn.functional.cross_entropy),
        Workload("resnet", _resnet, _images, nn.functional.cross_entropy),
    )
}
