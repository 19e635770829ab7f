"""What one rank does for the question of offloading: steps of a language model, its optimizer on the GPU or not."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import phalanx

HERE = Path(__file__).resolve().parent
WORDS, LENGTH = 8192, 1024
MICRO_BATCHES = (1, 4, 8)
PLAIN, OFFLOAD = "plain", "offload"


class Block(nn.Module):
    """Causal attention and two linear layers, each beside a way around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in parts)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """A decoder as in GPT-2: 12 width² parameters for each block."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class Trained:
    """One contestant: float32 parameters and autocast, or bfloat16 ones whose float32 masters lie on the host."""

    def __init__(self, name: str, width: int, blocks: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self._is_plain = name == PLAIN
        with device:
            model = LanguageModel(width, blocks)
        self.count = sum(p.numel() for p in model.parameters())
        self._device = device
        self.model = phalanx.DistributedDataParallel(model if self._is_plain else model.bfloat16())
        if self._is_plain:
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        else:
            self.optimizer = phalanx.ZeroRedundancyOptimizer(
                self.model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, offload=True
            )

    def step(self, tokens: Tensor, micro_batches: int) -> Tensor:
        """Train on all of `tokens`, cut into micro-batches; the last one's loss."""
        parts = tokens.chunk(micro_batches)
        for part in parts[:-1]:
            with self.model.no_sync():
                self._loss(part).backward()
        loss = self._loss(parts[-1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._is_plain):
            scores = self.model(tokens[:, :-1])
            return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def _tokens(batch: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (batch, LENGTH + 1), generator=generator).to(device)


def compare(
    rank: int, world_size: int, kind: str, width: int, blocks: int, batch: int, rounds: int, threads: int
) -> dict[str, Any]:
    """Seconds of a step of each contestant, one for each round, with so many micro-batches of `batch` sequences."""
    sys.path[:0] = [str(HERE.parent)]
    from harness import plan_rounds

    torch.set_num_threads(threads)
    device = _device(kind)
    contestants = {name: Trained(name, width, blocks, device) for name in (PLAIN, OFFLOAD)}
    seconds: dict[str, dict[str, list[float]]] = {}
    for micro_batches in MICRO_BATCHES:
        tokens = _tokens(batch * micro_batches, device)
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for contestant in contestants.values():
            contestant.step(tokens, micro_batches)
        for order in plan_rounds(list(contestants), rounds):
            for name in order:
                _synchronize(device)
                begin = time.perf_counter()
                contestants[name].step(tokens, micro_batches)
                _synchronize(device)
                times[name].append(time.perf_counter() - begin)
        seconds[f"step of {micro_batches} x {batch * LENGTH} tokens"] = times
    dist.barrier()
    return {"seconds": seconds, "parameters": contestants[PLAIN].count}


def outgrow(
    rank: int, world_size: int, kind: str, width: int, blocks: int, limit: int, steps: int, threads: int
) -> dict[str, Any]:
    """Train where a device has `limit` bytes, too few for the plain way; what became of each contestant."""
    torch.set_num_threads(threads)
    device = _device(kind)
    if kind == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(device).total_memory)
    tokens = _tokens(1, device)
    told: dict[str, Any] = {}
    for name in (PLAIN, OFFLOAD):
        losses = []
        try:
            contestant = Trained(name, width, blocks, device)
            told["parameters"] = contestant.count
            losses += [contestant.step(tokens, 1).item() for _ in range(steps)]
            told[name] = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps"
        except torch.OutOfMemoryError:
            told[name] = f"out of memory after {len(losses)} steps"
        contestant = None
        gc.collect()
        if kind == "cuda":
            told[f"{name}, peak"] = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    return told


def _device(kind: str) -> torch.device:
    device = torch.device(kind, 0) if kind != "cpu" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    return device


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
