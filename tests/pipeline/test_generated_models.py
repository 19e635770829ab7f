"""Models that were drawn, with all that a model may have, train in a pipeline as they do in one process.

A case that differs is told by its number: `draw_case(number, ranks)` makes it again.
"""

import random

import pytest
import torch
from tests.pipeline.generated import (
    draw_batch,
    draw_case,
    draw_generated,
    loss_of,
    make_optimizer,
    train_generated_unsplit,
)

import phalanx
from phalanx._base.partition.layers import list_layers
from phalanx.pipeline import weight_gradients, wire
from phalanx.testing import run_ranks

# What such a model may be refused for, at the door or after its first step; anything else is a failure.
REFUSALS = ("too few for", "has buffers and is called in stages", "in place")


def cut_by_dice(model, stages, seed):
    """Numbers of layers, or "auto" if there are too few of them."""
    count = len(list_layers(model, (), given=("x", "ids", "mask")).names)
    if count < stages:
        return "auto"
    begins = sorted(random.Random(seed).sample(range(1, count), stages - 1))
    return [b - a for a, b in zip([0, *begins], [*begins, count], strict=True)]


def train_one(case, rank, world_size):
    weight_gradients._LEAST_PRODUCT = case["seed"] % 3 * 100
    model = draw_generated(case["seed"])
    mesh = phalanx.mesh(pipeline=world_size // 2, data=2) if case["replicas"] > 1 else None
    ranks = world_size // case["replicas"]
    stages = 2 * ranks if case["schedule"] == "interleaved" else ranks
    args, given, _ = draw_batch(model, 0, 4)
    example = {"x": args[0], **({"ids": args[1]} if model.has_ids else {}), **given}
    balance = {"size": "auto", "time": "time", "drawn": ""}[case["balance"]] or cut_by_dice(model, stages, case["seed"])
    if len(list_layers(model, (), given=tuple(example)).names) < stages:
        balance = "auto"
    pipe = phalanx.Pipeline(
        model, stages, case["micro_batches"], case["schedule"], balance, case["checkpoint"],
        loss_fn=loss_of, example=example, mesh=mesh, outputs=case["outputs"],
    )  # fmt: skip
    kind, options, parameters = make_optimizer(case["optimizer"], pipe.parameters())
    if case["sharded"]:
        data = mesh.get_group("data")
        optimizer = phalanx.ZeroRedundancyOptimizer(parameters, kind, process_group=data, **options)
    else:
        optimizer = kind(parameters, **options)
    replica = mesh.get_local_rank("data") if mesh else 0
    torch.manual_seed(7 + replica)
    losses, norms = [], []
    for step, rows in enumerate(case["rows"]):
        if not (case["accumulates"] and step == 1):
            pipe.zero_grad()
        args, given, target = draw_batch(model, step * 10 + replica, rows)
        losses.append(pipe.step(*args, target=target, **given))
        if case["clips"]:
            norms.append(pipe.clip_grad_norm_(0.5))
        if not (case["accumulates"] and step == 0):
            optimizer.step()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
    pipe.eval()
    args, given, _ = draw_batch(model, 99, 9)
    output = pipe(*args, **given)
    return {"losses": losses, "norms": norms, "gradients": gradients, "output": output, "state": pipe.state_dict()}


def train_all(rank, world_size, cases):
    wire._LENT_BYTES = 64
    found = []
    for case in cases:
        try:
            found.append(train_one(case, rank, world_size))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def differences(case, ranks):
    """What is not as in one process, in words."""
    try:
        expected = train_generated_unsplit(case)
    except RuntimeError as error:
        return "refused" if "modified by an inplace operation" in str(error) else f"in one process: {error}"
    results = [one for one in ranks if isinstance(one, str)]
    if results:
        if len(results) == len(ranks) and any(words in results[0] for words in REFUSALS):
            return "refused"
        return "\n".join(map(str, (one if isinstance(one, str) else "no error" for one in ranks)))
    wrong = []

    def compare(ours, theirs, what):
        try:
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
        except Exception as error:
            wrong.append(f"{what}: {str(error)[:300]}")

    last = (world_size := len(ranks)) // case["replicas"] - 1
    for rank, one in enumerate(ranks):
        stage = rank // case["replicas"]
        compare(one["losses"], expected["losses"], f"losses on rank {rank}")
        if case["clips"]:
            torch.testing.assert_close(one["norms"], expected["norms"])
        if stage == last or case["outputs"] == "all":
            compare(one["output"], expected["output"], f"output on rank {rank} of {world_size}")
        elif one["output"] is not None:
            wrong.append(f"rank {rank} has an output")
        if list(one["state"]) != list(expected["state"]):
            wrong.append(f"the state has {list(one['state'])}")
        for name, value in expected["state"].items():
            compare(one["state"][name], value, f"{name} on rank {rank}")
        for name, gradient in one["gradients"].items():
            if (gradient is None) != (expected["gradients"][name] is None):
                wrong.append(
                    f"gradient of {name} on rank {rank}: {gradient}, in one process {expected['gradients'][name]}"
                )
            elif gradient is not None:
                compare(gradient, expected["gradients"][name], f"gradient of {name} on rank {rank}")
    return "\n".join(wrong)


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_drawn_models_train_as_in_one_process(world_size, effort):
    count = 3 * effort
    wrong, refused = {}, 0
    for begin in range(0, count, 40):
        cases = [draw_case(seed, world_size) for seed in range(begin, min(begin + 40, count))]
        by_rank = run_ranks(train_all, world_size, cases)
        for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
            results = differences(case, ranks)
            refused += results == "refused"
            if results not in ("", "refused"):
                wrong[case["seed"]] = f"{case}\n{results}"
    assert not wrong, f"{len(wrong)} of {count} differ, {sorted(wrong)}; the first:\n{next(iter(wrong.values()))}"
    assert refused < count / 3 + 1
