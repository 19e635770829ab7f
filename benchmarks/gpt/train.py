"""Be one rank of one contestant: `train.py NAME STEPS` trains for so many steps; rank 0 prints a line of JSON.

What a contestant wants in place of the bare loop's four calls is its `Loop`: how a step goes forward and backward,
clips the gradients and updates. Everything else is the same for all.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from model import BATCH, BETAS, BLOCK, CLIP, GPT, LEARNING_RATE, WARMUP_STEPS, batch_of, groups_of, read_text
from torch import Tensor, nn


@dataclass(frozen=True)
class Loop:
    """A loop has the calls that differ between contestants."""

    model: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor], object]
    clip: Callable[[], object]
    update: Callable[[], object]
    optimizer: Any  # its param_groups have the learning rate


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return nanoGPT's optimizer."""
    return torch.optim.AdamW(groups_of(model), lr=LEARNING_RATE, betas=BETAS, fused=True)


def loop_of(model: nn.Module, optimizer: Any) -> Loop:
    """Return the loop as people write it by hand."""

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameters = list(model.parameters())
    return Loop(
        model,
        lambda loss: loss.backward(),
        lambda: nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True),
        update,
        optimizer,
    )


def pytorch(backend: str) -> Loop:
    """Wrap the model in PyTorch's DDP."""
    dist.init_process_group(backend)
    model = nn.parallel.DistributedDataParallel(GPT())
    return loop_of(model, adamw(model))


def phalanx_ddp(options: Any = None) -> Loop:
    """Wrap it in our DDP over our backend."""
    import phalanx

    dist.init_process_group("phalanx", pg_options=options)
    model = phalanx.DistributedDataParallel(GPT())
    return loop_of(model, adamw(model))


def phalanx_bfloat16() -> Loop:
    """Do the same; between hosts each gradient has 16 bits."""
    import phalanx

    return phalanx_ddp(phalanx.Options(wire_dtype=torch.bfloat16))


def phalanx_zero() -> Loop:
    """Use our DDP with our sharded optimizer."""
    import phalanx

    dist.init_process_group("phalanx")
    model = phalanx.DistributedDataParallel(GPT())
    optimizer = phalanx.ZeroRedundancyOptimizer(
        groups_of(model), torch.optim.AdamW, lr=LEARNING_RATE, betas=BETAS, fused=True
    )
    return loop_of(model, optimizer)


def accelerate() -> Loop:
    """Use Accelerate, with its own clipping."""
    from accelerate import Accelerator

    one = Accelerator(cpu=True)
    plain = GPT()
    model, optimizer = one.prepare(plain, adamw(plain))
    loop = loop_of(model, optimizer)
    return replace(loop, backward=one.backward, clip=lambda: one.clip_grad_norm_(model.parameters(), CLIP))


def fabric() -> Loop:
    """Use Lightning Fabric, with its own clipping."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    one = Fabric(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        plugins=[TorchElasticEnvironment()],
    )
    one.launch()
    plain = GPT()
    model, optimizer = one.setup(plain, adamw(plain))
    loop = loop_of(model, optimizer)
    clip = lambda: one.clip_gradients(model, optimizer, max_norm=CLIP)  # noqa: E731 - as short as the others
    return replace(loop, backward=one.backward, clip=clip)


def deepspeed(stage: int) -> Loop:
    """Use DeepSpeed's engine, which clips in its step."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    plain = GPT()
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, optimizer, *_ = deepspeed.initialize(model=plain, optimizer=adamw(plain), config=settings)
    return Loop(engine, engine.backward, lambda: None, engine.step, optimizer)


CONTESTANTS: dict[str, Callable[[], Loop]] = {
    "PyTorch's DDP, Gloo": lambda: pytorch("gloo"),
    "Accelerate, Gloo": accelerate,
    "Lightning Fabric, Gloo": fabric,
    "DeepSpeed, Gloo": lambda: deepspeed(0),
    "DeepSpeed ZeRO 2, Gloo": lambda: deepspeed(2),
    "PyTorch's DDP, phalanx": lambda: pytorch("phalanx"),
    "our DDP, phalanx": phalanx_ddp,
    "our DDP, bfloat16 between hosts": phalanx_bfloat16,
    "our DDP and ZeRO": phalanx_zero,
}


def main() -> None:
    name, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(1337)
    loop = CONTESTANTS[name]()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = read_text()
    losses, seconds = [], []
    for step in range(steps):
        tokens, targets = batch_of(text, step, rank, world_size)
        for group in loop.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        begin = time.perf_counter()
        loss = loop.model(tokens, targets)
        loop.backward(loss)
        loop.clip()
        loop.update()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.detach())
    whole = torch.stack(losses)
    dist.all_reduce(whole)
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        result = {
            "tokens_per_step": BATCH * BLOCK * world_size,
            "seconds": seconds,
            "losses": (whole / world_size).tolist(),
            "peak_mb": peak.item(),
        }
        print("result", json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
