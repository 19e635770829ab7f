"""The right sides of docs/how-to/strategies.md's second table, against what Fabric and Accelerate gave on two ranks.

What they gave is in `fabric_and_accelerate.json`, with their versions; `fabric_and_accelerate.py` writes it.
"""

import itertools
import json
from pathlib import Path

import torch
from tests.strategies.fabric_and_accelerate import LOOPS, make_data, make_model, matrix, shown
from torch.nn import functional as F
from torch.utils.data import DataLoader

from phalanx import strategies
from phalanx.testing import run_ranks

RECORDED = json.loads(Path(__file__).with_name("fabric_and_accelerate.json").read_text())


def train(size=24, accumulate=1, max_norm=None, precision="32-true"):
    strategy = strategies.get("mirrored")
    model = make_model()
    strategy.setup(model, torch.optim.SGD(model.parameters(), lr=0.05), F.mse_loss, precision=precision)
    loader = strategy.distribute(DataLoader(make_data(size), 8))
    losses = []
    for _ in range(2):
        for number, batch in enumerate(loader, start=1):
            is_last = number % accumulate == 0
            loss = strategy.compute_gradients(batch, share=1 / accumulate, is_last=is_last)
            losses.append(float(strategy.reduce("mean", loss)))
            if is_last:
                strategy.update(max_norm)
    result = shown(losses, strategy.bare_model)
    strategy.close()
    return result


def own_loop():
    """`model` and `optimizer` as setup gives them, with the loop that Fabric has."""
    strategy = strategies.get("mirrored")
    model = make_model()
    model, optimizer = strategy.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []
    for _, (number, batch) in itertools.product(range(2), enumerate(strategy.distribute(DataLoader(make_data(24), 8)))):
        is_last = number % 3 == 2
        with model.no_sync() if not is_last else torch.enable_grad():
            loss = F.mse_loss(model(batch[0]), batch[1])
            (loss / 3).backward()
        losses.append(float(strategy.reduce("mean", loss)))
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    result = shown(losses, strategy.bare_model)
    strategy.close()
    return result


def test_each_loop_of_the_table_trains_as_fabric_and_accelerate_do():
    def fn(rank, world_size):
        return {name: train(**options) for name, options in LOOPS.items()} | {"own loop": own_loop()}

    for seen in run_ranks(fn, 2):
        for peer, of in RECORDED.items():
            for name in LOOPS:
                if (peer, name) == ("accelerate", "train 22"):  # which fills the last batch with the first samples
                    assert len(of[name][0]) == len(seen[name][0])
                    continue
                numbers = {"rtol": 2e-3, "atol": 2e-3} if name == "bf16-mixed" else {"rtol": 1e-5, "atol": 1e-6}
                for ours, theirs in zip(seen[name], of[name], strict=True):
                    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), **numbers, msg=name)
        assert seen["own loop"] == seen["accumulate and clip"]
        torch.testing.assert_close(
            torch.tensor(seen["train"][0]), torch.tensor(RECORDED["accelerate"]["split_batches"][0])
        )


def test_values_are_reduced_and_gathered_as_the_table_says():
    def fn(rank, world_size):
        strategy = strategies.get("mirrored")
        mine = matrix(rank)
        values = [strategy.reduce("mean", mine), strategy.reduce("sum", mine), strategy.gather(mine)]
        assert torch.equal(mine, matrix(rank))  # Fabric's all_reduce overwrites it
        return [one.tolist() for one in values], strategy.is_main

    fabric, accelerate = RECORDED["fabric"], RECORDED["accelerate"]
    for rank, ((mean, total, gathered), is_main) in enumerate(run_ranks(fn, 2)):
        assert mean == fabric["all_reduce"]
        assert total == accelerate["reduce"]
        assert gathered == accelerate["gather"]
        assert is_main == (rank == 0)
    # Fabric's goes behind each other along a new axis (and of a tensor that its all_reduce has overwritten: its own)
    assert torch.tensor(fabric["all_gather"]).shape == (2, 2, 3)
