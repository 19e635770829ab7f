"""What is compared: a wrapper, an optimizer, a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from phalanx import DistributedDataParallel, ZeroRedundancyOptimizer


@dataclass(frozen=True)
class Contestant:
    backend: str
    wrap: Callable[[nn.Module], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def _pytorch(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def _pytorch_views(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


def _plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def _torch_zero(parameters: Any) -> torch.optim.Optimizer:
    return TorchZero(parameters, torch.optim.AdamW, fused=True)


def _zero(parameters: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, fused=True)


CONTESTANTS = {
    "pytorch": Contestant("gloo", _pytorch, _plain),
    "pytorch-zero": Contestant("gloo", _pytorch, _torch_zero),
    "pytorch-views": Contestant("gloo", _pytorch_views, _plain),
    "pytorch-views-zero": Contestant("gloo", _pytorch_views, _torch_zero),
    "phalanx": Contestant("phalanx", DistributedDataParallel, _plain),
    "phalanx-zero": Contestant("phalanx", DistributedDataParallel, _zero),
}


def perceptron(width: int) -> nn.Module:
    """1024 in, three layers of `width`, 1024 out."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1024, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1024),
    )  # fmt: skip


WIDTHS = {"25": 3072, "100": 6576}  # millions of parameters: width
