"""The right sides of strategies.md's first table, with the inputs of `tf_distribute.py`, against TensorFlow's.

What TensorFlow 2.21.0 gave is in `tf_distribute.json`; that script writes it.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.strategies.tf_distribute import W, X, Y
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import strategies
from phalanx.strategies import OneDeviceStrategy, get_replica_context, get_strategy
from phalanx.testing import run_ranks

RECORDED = json.loads(Path(__file__).with_name("tf_distribute.json").read_text())["results"]

DIFFERENT = {
    "local results",  # a process has one replica
    "batches 10 by 5",  # refused: no replica has more than another
}
"""Where the docs say that ours is something else."""


def matrix(rank):
    return torch.tensor([[1.0, 2, 3], [4, 5, 6]]) * (rank + 1)


def rows(rank):
    return torch.full((rank + 1, 2), rank + 1.0)


def integers(rank):
    return torch.tensor([rank + 1, 4])


def number(rank):
    return torch.tensor(rank + 1.0)


def batches(strategy, size, batch_size, **options):
    loader = strategy.loader(range(size), batch_size, shuffle=False, padding=False, **options)
    return [batch.tolist() for batch in loader]


def entering(outer, inner):
    with outer.scope(), inner.scope():
        return True


def train(strategy, size):
    """As TensorFlow's: a sum over the samples, divided by the whole batch, also where the last is smaller."""
    with strategy.scope():
        model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(W).T)
        model.bias.zero_()

    def loss_of(model, batch):
        inputs, targets = batch
        return (model(inputs) - targets).square().sum() / (8 / strategy.num_replicas_in_sync)

    model, _ = strategy.setup(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_of=loss_of)
    data = TensorDataset(torch.tensor(X[:size]), torch.tensor(Y[:size]))
    loader = strategy.experimental_distribute_dataset(DataLoader(data, 8))
    losses = [strategy.reduce("mean", strategy.step(*batch)) for _, batch in itertools.product(range(2), loader)]
    weight, bias = (one.detach() for one in strategy.bare_model.parameters())
    strategy.close()
    return [losses, weight.T, bias]


def right_sides(rank):
    mirrored = strategies.MirroredStrategy(["cpu:0", "cpu:1"])
    SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.AVG
    mine = mirrored.experimental_distribute_values_from_function
    value_of = {
        make.__name__: mine(lambda context, make=make: make(context.replica_id_in_sync_group))
        for make in (matrix, rows, integers, number)
    }
    x = value_of["number"]

    def in_replica(function, *values):
        return mirrored.run(lambda *given: function(get_replica_context(), *given), args=values)

    def read(context):
        whole = torch.arange(8).split(context.get_per_replica_batch_size(4))
        return whole[context.input_pipeline_id :: context.num_input_pipelines]

    def one_device():
        one = get_strategy()  # OneDeviceStrategy is of a process that is alone
        return [
            one.num_replicas_in_sync,
            one.run(lambda x: x + 1, args=(1,)),
            one.reduce(SUM, torch.tensor(3.0), axis=None),
            one.reduce(MEAN, torch.tensor([3, 4]), axis=0),
            one.experimental_local_results(5),
            one.gather(torch.tensor([1, 2]), axis=0),
        ]

    return {
        "no scope": lambda: [
            strategies.has_strategy(),
            get_strategy().num_replicas_in_sync,
            get_strategy().reduce(MEAN, torch.tensor([3, 4]), axis=0),
            get_replica_context().replica_id_in_sync_group,
            get_replica_context().all_reduce(SUM, torch.tensor(2.0)),
        ],
        "replicas": lambda: mirrored.num_replicas_in_sync,
        "values from function": lambda: x,
        **{
            f"reduce {what} {name} {axis}": lambda what=what, op=op, axis=axis: mirrored.reduce(
                op, value_of[what], axis
            )
            for what in value_of
            for name, op in (("SUM", SUM), ("MEAN", MEAN))
            for axis in (None, 0, 1, -1, (0, 1))
            if what != "rows" or axis in (0, (0, 1))  # else ranks differ, and the group is of no more use: at the end
        },
        "reduce by name": lambda: [mirrored.reduce(op, x, axis=None) for op in ("SUM", "mean")],
        "reduce nested": lambda: mirrored.reduce(SUM, {"a": x, "b": [value_of["matrix"]]}, axis=None),
        "reduce max": lambda: mirrored.reduce("MAX", x, axis=None),
        "gather 0": lambda: mirrored.gather(value_of["matrix"], axis=0),
        "gather 1": lambda: mirrored.gather(value_of["matrix"], axis=1),
        "gather 2": lambda: mirrored.gather(value_of["matrix"], axis=2),
        "gather rows": lambda: mirrored.gather(value_of["rows"], axis=0),
        "gather number": lambda: mirrored.gather(x, axis=0),
        "local results": lambda: len(mirrored.experimental_local_results(x)),
        "run": lambda: mirrored.run(lambda x, k: x * k, args=(x,), kwargs={"k": 10.0}),
        "run list": lambda: mirrored.run(lambda x: x, args=[x]),
        "run args=(x)": lambda: mirrored.run(lambda x: x, args=x),
        "run raises": lambda: mirrored.run(lambda: 1 / 0),
        "context": lambda: in_replica(lambda ctx: [ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync]),
        "context strategy": lambda: in_replica(
            lambda ctx: [ctx.strategy is mirrored, get_strategy() is mirrored, strategies.has_strategy()]
        ),
        "context all_reduce": lambda: in_replica(lambda ctx, x: ctx.all_reduce(SUM, x), value_of["matrix"]),
        "context all_reduce mean": lambda: in_replica(lambda ctx, x: ctx.all_reduce(MEAN, [x, {"a": 2 * x}]), x),
        "context all_gather": lambda: in_replica(lambda ctx, x: ctx.all_gather(x, axis=0), value_of["rows"]),
        "context merge_call": lambda: in_replica(
            lambda ctx, x: ctx.merge_call(
                lambda strategy, value, k: strategy.reduce(SUM, value, axis=None) * k, args=(x,), kwargs={"k": 2.0}
            ),
            x,
        ),
        "scope in its own": lambda: entering(mirrored, mirrored),
        "scope in another": lambda: entering(mirrored, get_strategy()),
        "batches 8 by 4": lambda: batches(mirrored, 8, 4),
        "batches 10 by 4": lambda: batches(mirrored, 10, 4),
        "batches 9 by 4": lambda: batches(mirrored, 9, 4),
        "batches 9 by 4 drop": lambda: batches(mirrored, 9, 4, drop_last=True),
        "batches 10 by 5": lambda: batches(mirrored, 10, 5),
        "batches 3 by 4": lambda: batches(mirrored, 3, 4),
        "batches from function": lambda: [batch.tolist() for batch in mirrored.distribute_datasets_from_function(read)],
        "batch of 5 for 2": lambda: mirrored.distribute_datasets_from_function(
            lambda context: context.get_per_replica_batch_size(5)
        ),
        "one device": one_device,
        "device oven": lambda: strategies.MirroredStrategy(["oven"]),
        "train": lambda: train(strategies.MirroredStrategy(), 24),
        "train 20": lambda: train(strategies.MirroredStrategy(), 20),
        "reduce rows SUM None": lambda: mirrored.reduce(SUM, value_of["rows"], axis=None),
    }


def result(case):
    try:
        return case()
    except Exception:
        return {"error": True}


def of_replica(recorded, rank):
    """What TensorFlow has in one replica."""
    if isinstance(recorded, dict) and recorded.keys() == {"each"}:
        return recorded["each"][rank]
    if isinstance(recorded, dict):
        return {key: of_replica(one, rank) for key, one in recorded.items()}
    return [of_replica(one, rank) for one in recorded] if isinstance(recorded, list) else recorded


def plain(value):
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def close(ours, theirs):
    """Equal, numbers to rounding."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(close(ours[key], theirs[key]) for key in ours)
    return ours == theirs or (isinstance(ours, float) and ours == pytest.approx(theirs, rel=1e-5, abs=1e-6))


def test_each_line_of_the_table_gives_what_tensorflow_gives():
    def fn(rank, world_size):
        return {name: plain(result(case)) for name, case in right_sides(rank).items()}

    ended = run_ranks(fn, 2)
    wrong = {}
    for rank, seen in enumerate(ended):
        for name, ours in seen.items():
            theirs = of_replica(RECORDED[name], rank)
            if name.startswith("batches") and "error" not in ours:  # which replica has which sample is another matter
                pairs = itertools.zip_longest(*(one[name] for one in ended), fillvalue=[])
                ours = [sorted(itertools.chain(*pair)) for pair in pairs]
                theirs = [sorted(itertools.chain(*pair)) for pair in RECORDED[name]]
                if name == "batches 9 by 4":  # TensorFlow's second replica has a third batch, without samples
                    assert [len(one[name]) for one in ended] == [3, 2]
            if not close(ours, theirs):
                wrong[name] = ours, theirs
    assert wrong.keys() == DIFFERENT, wrong
    assert ended[0].keys() >= RECORDED.keys() - {"train alone", "fit"} - {n for n in RECORDED if "rows" in n}


def test_one_device_trains_as_the_one_of_tensorflow_does():
    seen = plain(train(OneDeviceStrategy("cpu:0"), 24))
    assert close(seen, RECORDED["train alone"])
    assert close(seen[1:], RECORDED["fit"])  # Keras has no other mathematics
