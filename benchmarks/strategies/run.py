"""How long is a strategy's step, against the same written by hand with the pieces?"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx import strategies

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import (  # noqa: E402 - the line above says where it is
    add_output_arguments,
    describe_machine,
    format_ratio,
    format_time,
    plan_rounds,
    print_table,
    summarise,
    write_results,
)

WIDTH, BATCH, SYNC_EVERY = 768, 64, 4
Step = Callable[[Tensor, Tensor], Any]


def build() -> nn.Module:
    """A perceptron whose step takes some ten milliseconds."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The loop of everybody."""

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_hand(word: str, strategy: strategies.Strategy) -> Step:
    """The pieces without a strategy; `strategy` has started what there is one of in a process, as the servers."""
    model = build()
    if word == "single_device":
        return plain(model, adamw(model.parameters()))
    if word == "mirrored":
        return plain(phalanx.DistributedDataParallel(model), adamw(model.parameters()))
    if word == "sharded":
        wrapped = phalanx.DistributedDataParallel(model)
        return plain(wrapped, phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4))
    if word == "sharded model":
        from torch.distributed.fsdp import fully_shard

        for block in model:
            if any(True for _ in block.parameters()):
                fully_shard(block)
        fully_shard(model)
        return plain(model, adamw(model.parameters()))
    if word == "pipeline":
        return pipeline_by_hand(model)
    if word == "parameter_server":
        return server_by_hand(model, strategy)
    optimizer = adamw(model.parameters())
    keep: Any = {
        "local_sgd": lambda: phalanx.LocalSGD(model, optimizer, sync_every=SYNC_EVERY),
        "diloco": lambda: phalanx.DiLoCo(model, optimizer, outer(model.parameters()), sync_every=SYNC_EVERY),
    }[word]()
    assert keep.local_steps == 0
    return plain(model, optimizer)


def pipeline_by_hand(model: nn.Module) -> Step:
    pipe = phalanx.Pipeline(model, loss_fn=F.mse_loss, micro_batches=4)
    optimizer = adamw(pipe.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = pipe.step(inputs, target=targets)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def server_by_hand(model: nn.Module, strategy: strategies.Strategy) -> Step:
    held = dict(model.named_parameters())
    servers = [f"server{number}" for number in range(1)]
    trainers = [f"trainer{number}" for number in range(strategy.num_replicas_in_sync)]
    server = phalanx.ParameterServer(
        servers,
        trainers,
        dense=held,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4),
        synchronous=True,
        name="by hand",  # another than the strategy's, or both would train the same parameters
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        server.push_gradients({name: one.grad for name, one in held.items()})
        with torch.no_grad():
            for name, value in server.pull().items():
                held[name].copy_(value)
        model.zero_grad()
        return loss.detach()

    step.close = server.close  # type: ignore[attr-defined]
    return step


WORDS: dict[str, tuple[str, dict[str, Any], int]] = {  # the strategy, its options, and on how many ranks
    "single_device": ("single_device", {}, 1),
    "mirrored": ("mirrored", {}, 2),
    "sharded": ("sharded", {}, 2),
    "sharded model": ("sharded", {"shard": "model"}, 2),
    "pipeline": ("pipeline", {"micro_batches": 4}, 2),
    "parameter_server": ("parameter_server", {}, 2),
    "local_sgd": ("local_sgd", {"sync_every": SYNC_EVERY}, 2),
    "diloco": ("diloco", {"sync_every": SYNC_EVERY}, 2),
}


def rank_main(word: str, rounds: int, steps: int) -> dict[str, list[float]] | None:
    """Seconds of a step of both, round by round; None on a rank that serves."""
    name, options, _ = WORDS[word]
    torch.set_num_threads(1)
    try:
        strategy = strategies.get(name, **options)
    except SystemExit:  # of a rank that serves
        return None
    strategy.setup(build(), adamw, F.mse_loss)
    contestants: dict[str, Step] = {"strategy": strategy.step, "by hand": by_hand(word, strategy)}
    generator = torch.Generator().manual_seed(strategy.replica_id_in_sync_group)
    inputs, targets = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    losses = {who: [float(step(inputs, targets)) for _ in range(2 * SYNC_EVERY)] for who, step in contestants.items()}
    torch.testing.assert_close(losses["strategy"], losses["by hand"], rtol=1e-4, atol=1e-5)
    group = strategy.process_group
    samples: dict[str, list[float]] = {who: [] for who in contestants}
    for order in plan_rounds(list(contestants), rounds):
        for who in order:
            step = contestants[who]
            if group is not None:
                dist.barrier(group=group)
            begun = time.perf_counter()
            for _ in range(steps):
                step(inputs, targets)
            samples[who].append((time.perf_counter() - begun) / steps)
    getattr(contestants["by hand"], "close", lambda: None)()
    strategy.close()
    return samples


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", choices=[*WORDS, []], help="default all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=16, help="per round, a multiple of 4")
    add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    machine = describe_machine()
    results: dict[str, Any] = {}
    rows = []
    for word in arguments.words or list(WORDS):
        ranks = phalanx.launch(
            rank_main, (word, arguments.rounds, arguments.steps), nproc_per_node=WORDS[word][2], no_affinity=True
        )
        samples = ranks[0]
        results[word] = samples
        ratio = statistics.median(s / h for s, h in zip(samples["strategy"], samples["by hand"], strict=True))
        rows.append(
            [
                word,
                *(format_time(summarise(samples[who]).median) for who in ("strategy", "by hand")),
                format_ratio(ratio),
                "yes" if ratio <= 1.03 else "no",
            ]
        )
    print_table(["", "strategy", "by hand", "ratio", "within 3 %"], rows)
    write_results(arguments.output, {"seconds_per_step": results}, machine=machine)


if __name__ == "__main__":
    main()
