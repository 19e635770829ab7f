"""How long are a call, a tensor's way and a distributed training step, beside torch.distributed.rpc?"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phalanx.testing import run_ranks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is

MODULES = {"torch.distributed.rpc": "torch.distributed.rpc", "phalanx.rpc": "phalanx.rpc"}
IN_FLIGHT = 100
WARMUP = 200
KIB, MIB = 1 << 10, 1 << 20


def nothing() -> None:
    """A call that does nothing."""


def take(tensor: torch.Tensor) -> None:
    """A call that takes a tensor."""


def give_back(tensor: torch.Tensor) -> torch.Tensor:
    """A call that takes a tensor and returns it."""
    return tensor


def latency(rpc: Any, call: Callable[..., Any], args: tuple[Any, ...], count: int) -> float:
    """The median of `count` calls, one after the other, in seconds."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        rpc.rpc_sync("callee", call, args)
        seconds.append(time.perf_counter() - begin)
    return harness.summarise(seconds).median


def interval(rpc: Any, count: int) -> float:
    """Seconds between two answers, with `IN_FLIGHT` calls under way."""
    waiting: deque[Any] = deque()
    begin = time.perf_counter()
    for _ in range(count):
        if len(waiting) == IN_FLIGHT:
            waiting.popleft().wait()
        waiting.append(rpc.rpc_async("callee", nothing))
    for future in waiting:
        future.wait()
    return (time.perf_counter() - begin) / count


class Layer:
    """A part of the model of the training step."""

    def __init__(self) -> None:
        self.weight = torch.rand(16, 16).requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its output."""
        return torch.tanh(x @ self.weight)

    def get_weight(self) -> torch.Tensor:
        """Its parameter."""
        return self.weight


def training_step(rpc: Any, count: int) -> dict[str, float]:
    """The medians of `count` iterations over the layers of three workers: forward, and backward with a step."""
    ours = rpc.__name__.startswith("phalanx")
    autograd = importlib.import_module("phalanx.rpc.autograd" if ours else "torch.distributed.autograd")
    optim = importlib.import_module("phalanx.optim" if ours else "torch.distributed.optim")
    here = Layer()
    layers = [rpc.remote(name, Layer) for name in ("callee", "third")]
    parameters = [rpc.RRef(here.weight), *(layer.remote().get_weight() for layer in layers)]
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
    x = torch.rand(8, 16)
    whole, backward = [], []
    for _ in range(count + 20):
        begin = time.perf_counter()
        with autograd.context() as context_id:
            y = here.forward(x)
            for layer in layers:
                y = layer.rpc_sync().forward(y)
            loss = y.sum()
            middle = time.perf_counter()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            end = time.perf_counter()
        whole.append(time.perf_counter() - begin)
        backward.append(end - middle)
    return {
        "backward over three workers, and step": harness.summarise(backward[20:]).median,
        "the whole training step": harness.summarise(whole[20:]).median,
    }


def measure(rpc: Any, quick: int) -> dict[str, float]:
    """Each case once, in seconds."""
    small, large = torch.ones(KIB // 4), torch.ones(64 * MIB // 4)
    for _ in range(WARMUP):
        rpc.rpc_sync("callee", nothing)
    for _ in range(3):
        rpc.rpc_sync("callee", give_back, (large,))
    interval(rpc, WARMUP)
    return {
        "no-op rpc_sync": latency(rpc, nothing, (), 2000 // quick),
        "no-op rpc_async, 100 in flight, each": interval(rpc, 20000 // quick),
        "1 KiB tensor as argument": latency(rpc, take, (small,), 2000 // quick),
        "64 MiB tensor as argument": latency(rpc, take, (large,), 20),
        "64 MiB tensor there and back": latency(rpc, give_back, (large,), 20),
        **training_step(rpc, 400 // quick),
    }


def worker(rank: int, world_size: int, module: str, folder: str, quick: int) -> dict[str, float] | None:
    """One of the three; the first one calls, and the third one takes part in the training step alone."""
    rpc = importlib.import_module(module)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
    name = ["caller", "callee", "third"][rank]
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        return measure(rpc, quick) if rank == 0 else None
    finally:
        rpc.shutdown()


def main() -> None:
    """Both in turns, medians over the rounds, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", type=int, default=1, help="make so many times fewer calls")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in MODULES}
    for order in harness.plan_rounds(list(MODULES), arguments.rounds):
        for name in order:
            with tempfile.TemporaryDirectory() as folder:
                results = run_ranks(
                    worker, 3, MODULES[name], folder, arguments.quick, init=False, start="fork", timeout=600
                )
            for case, seconds in results[0].items():
                samples[name].setdefault(case, []).append(seconds)
    torchs, ours = samples["torch.distributed.rpc"], samples["phalanx.rpc"]
    rows = []
    record: dict[str, Any] = {}
    for case in torchs:
        theirs, mine = harness.summarise(torchs[case]).median, harness.summarise(ours[case]).median
        rows.append((case, harness.format_time(theirs), harness.format_time(mine), harness.format_ratio(mine / theirs)))
        record[case] = {"torch.distributed.rpc": torchs[case], "phalanx.rpc": ours[case], "ratio": mine / theirs}
    harness.print_table(("case", "torch.distributed.rpc", "phalanx.rpc", "of its time"), rows)
    harness.write_results(arguments.output, record, machine=harness.describe_machine())


if __name__ == "__main__":
    main()
