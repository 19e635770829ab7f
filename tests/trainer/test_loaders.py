"""What a Trainer is given to train on: streams, what has no length, several loaders, a function for each replica."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from tests.logs import logged
from tests.on_ranks import on_ranks
from tests.small_models import make_data, mlp
from tests.trainer.trainers import make
from tests.training import copy_parameters, copy_state, train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

import phalanx
from phalanx import strategies
from phalanx.data import Stream
from phalanx.testing import run_ranks


class Iterated(IterableDataset):
    """The samples of a table, one after another; `part` of them."""

    def __init__(self, size: int, part: slice = slice(None)) -> None:
        self.samples = list(make_data(size))[part]

    def __iter__(self):
        return iter(self.samples)


def stream_of(size: int) -> Stream:
    table = make_data(size)
    cut = size // 3
    shards = [range(cut), range(cut, size)]
    lengths = [len(one) for one in shards]
    return Stream(shards, lambda shard: [table[i] for i in shard], lengths=lengths)


def loader_of(kind: str, size: int, batch: int) -> Any:
    if kind == "function":
        return lambda context: DataLoader(
            Iterated(size, slice(context.input_pipeline_id, None, context.num_input_pipelines)), batch
        )
    data: Dataset = {"table": make_data, "stream": stream_of, "iterable": Iterated}[kind](size)
    return DataLoader(data, batch)


def plain_model():
    return mlp((6, 16, 1), activation=nn.ReLU, seed=1)


def make_trainer(strategy: Any, **options: Any) -> phalanx.Trainer:
    error = {"error": lambda result, target: (result - target).abs()}
    return phalanx.Trainer(
        plain_model(), lambda p: torch.optim.SGD(p, lr=1e-2), F.mse_loss, strategy=strategy, metrics=error,
        show_progress=False, **options,
    )  # fmt: skip


def _measure(rank, world_size, kinds, size):
    found = {}
    for kind in kinds:
        with strategies.get("mirrored", launch=False) as strategy:
            found[kind] = make_trainer(strategy).validate(loader_of(kind, size, 2 * world_size))
    return found


@pytest.mark.slow(but=("1-2", "7-3"))
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("size", [1, 7, 12])
def test_a_validation_counts_each_sample_once_whatever_it_reads(world_size, size):
    table = make_data(size)
    with torch.no_grad():
        inputs, targets = table.tensors
        result = plain_model()(inputs)
    expected = {"loss": float(F.mse_loss(result, targets)), "error": float((result - targets).abs().mean())}
    for measured in run_ranks(_measure, world_size, ("table", "stream", "iterable", "function"), size):
        for kind, metrics in measured.items():
            assert metrics == pytest.approx(expected, rel=1e-5), kind


def _train_iterable(rank, world_size, size, batch, accumulate):
    with strategies.get("mirrored", launch=False) as strategy:
        trainer = make_trainer(strategy, accumulate=accumulate, max_epochs=2)
        trainer.fit(loader_of("iterable", size, batch))
        return trainer.step, copy_parameters(trainer.strategy.bare_model)


@pytest.mark.slow(but=("20-6-2", "13-5-1"))
@pytest.mark.parametrize(("size", "batch", "accumulate"), [(20, 6, 1), (20, 6, 2), (7, 4, 3), (13, 5, 1), (1, 4, 1)])
def test_what_can_only_be_iterated_trains_as_one_process_does_with_any_number_of_ranks(size, batch, accumulate):
    """Batches that replicas can't share evenly, and last ones of which some have nothing, count by their samples."""
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs, targets = make_data(size).tensors
    for _ in range(2):
        batches = zip(inputs.split(batch * accumulate), targets.split(batch * accumulate), strict=True)
        expected = train(model, optimizer, batches, F.mse_loss)
    for step, weights in run_ranks(_train_iterable, 3, size, batch, accumulate):
        assert step == 2 * -(-size // (batch * accumulate))
        torch.testing.assert_close(weights, expected)


def _step_over_iterable(rank, world_size, size, batch):
    with strategies.get("mirrored", launch=False) as strategy:
        strategy.setup(plain_model(), lambda p: torch.optim.SGD(p, lr=1e-2), F.mse_loss)
        iterated, table = (
            strategy.loader(data, 3, shuffle=False) for data in (Iterated(5), make_data(6))
        )  # one that is only read, and one that all share evenly
        loader = strategy.distribute(DataLoader(Iterated(size), batch))
        for number, (x, y) in enumerate(loader):
            if number % 2:
                strategy.step(x, y)
            else:  # its halves
                strategy.compute_gradients((x, y))
                strategy.update()
            for inputs, _ in iterated:
                strategy.evaluate(inputs)
        for x, y in table:
            strategy.step(x, y)
        return copy_parameters(strategy.bare_model)


@pytest.mark.slow(but=("13-5",))
@pytest.mark.parametrize(("size", "batch"), [(20, 6), (7, 4), (13, 5), (1, 4)])
def test_a_loop_of_ones_own_counts_what_can_only_be_iterated_by_its_samples(size, batch):
    """The part of a last batch that has fewer samples counted as much as a full one, and so did the sample that a
    replica computes for nothing."""
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs, targets = make_data(size).tensors
    parts = list(zip(inputs.split(batch), targets.split(batch), strict=True))
    inputs, targets = make_data(6).tensors
    parts += zip(inputs.split(3), targets.split(3), strict=True)
    expected = train(model, optimizer, parts, F.mse_loss)
    for weights in run_ranks(_step_over_iterable, 3, size, batch):
        torch.testing.assert_close(weights, expected)


def _normalized_model():
    return nn.Sequential(plain_model()[0], nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def _train_normalized(rank, world_size, size, batch, seed):
    torch.manual_seed(seed)
    with strategies.MirroredStrategy(launch=False, sync_batchnorm=True) as strategy:
        trainer = phalanx.Trainer(
            _normalized_model(), lambda p: torch.optim.SGD(p, lr=1e-2), F.mse_loss, strategy=strategy, max_epochs=2,
            show_progress=False,
        )  # fmt: skip
        trainer.fit(loader_of("iterable", size, batch))
        return copy_state(trainer.strategy.bare_model)


def test_a_batch_that_does_not_count_is_in_no_statistics_of_batchnorm():
    """The sample that a replica computes for nothing, where it has none of a last batch, was one of those by which
    SyncBatchNorm normalized all the others: other weights than those of one process, and nothing said so."""
    size, batch, seed = 14, 6, 3  # the last batch has two samples for three ranks
    torch.manual_seed(seed)
    model = _normalized_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs, targets = make_data(size).tensors
    for _ in range(2):
        train(model, optimizer, zip(inputs.split(batch), targets.split(batch), strict=True), F.mse_loss)
    for state in run_ranks(_train_normalized, 3, size, batch, seed):
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "batch", "accumulate"), [(2, 6, 1), (13, 6, 3)])
@on_ranks(3)
def test_a_batch_that_does_not_count_is_not_taken_for_one_that_two_ranks_were_given(size, batch, accumulate):
    """A rank without a sample of the last batch computes another rank's for nothing. In the first three epochs this
    was "the same batch in each of the first 3 steps, so they do the same work twice"."""
    with logged() as lines, strategies.get("mirrored", launch=False) as strategy:
        make_trainer(strategy, accumulate=accumulate, max_epochs=3).fit(loader_of("iterable", size, batch))
    assert not [line for line in lines if "same batch" in line]


def _train_uneven(rank, world_size):
    seen = []

    class Own(nn.Linear):
        def training_step(self, batch):
            seen.extend(batch[:, 0].tolist())
            return self(batch).square().mean()

        def validation_step(self, batch):
            return {"sum": batch[:, 0]}

    with strategies.get("mirrored", launch=False) as strategy:
        trainer = phalanx.Trainer(
            Own(1, 1), lambda p: torch.optim.SGD(p, lr=1e-4), strategy=strategy, max_epochs=2, show_progress=False
        )
        batches = [torch.full((2, 1), float(10 * rank + i)) for i in range(3 + rank)]
        trainer.fit(lambda context: batches, lambda context: batches)
        return trainer.step, seen, trainer.metrics["sum"]


def test_replicas_whose_own_loaders_differ_train_as_far_as_the_first_and_are_all_measured():
    (steps, first, mean), (others, second, same) = run_ranks(_train_uneven, 2)
    assert (steps, others) == (6, 6)
    assert first == [0, 0, 1, 1, 2, 2] * 2
    assert second == [10, 10, 11, 11, 12, 12] * 2
    assert mean == same == pytest.approx((0 + 1 + 2 + 10 + 11 + 12 + 13) / 7)


class TwoParts(nn.Linear):
    """It has a batch of each of two loaders in a step."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.seen: dict[str, list[float]] = {"first": [], "second": []}
        self.sizes: list[tuple[int, int]] = []

    def training_step(self, batch):
        for name, one in batch.items():
            self.seen[name] += one[:, 0].tolist()
        self.sizes.append((len(batch["first"]), len(batch["second"])))
        return self(batch["first"]).square().mean() + self(batch["second"]).abs().mean()


def numbers(size: int) -> list[torch.Tensor]:
    return [torch.tensor([float(i)]) for i in range(size)]


def train_two(strategy, first, second, **options):
    trainer = phalanx.Trainer(
        TwoParts(), lambda p: torch.optim.SGD(p, lr=1e-4), strategy=strategy, show_progress=False, **options
    )
    trainer.fit({"first": first, "second": second})
    return trainer


@pytest.mark.parametrize("workers", [0, 2])
def test_several_loaders_give_a_batch_each_in_every_step_and_the_longest_says_what_an_epoch_is(workers):
    first, second = numbers(22), numbers(5)
    trainer = train_two(
        strategies.SingleDeviceStrategy("cpu"),
        DataLoader(first, 4, shuffle=True, num_workers=workers),
        DataLoader(second, 2, shuffle=True),
        max_epochs=2,
    )
    model = trainer.strategy.bare_model
    assert trainer.step == 12
    assert model.sizes == [(4, 2)] * 5 + [(2, 1)] + [(4, 2)] * 5 + [(2, 1)]
    for epoch in range(2):
        assert sorted(model.seen["first"][22 * epoch : 22 * epoch + 22]) == list(range(22))
    for begin in range(0, 20, 5):  # the shorter one goes round
        assert sorted(model.seen["second"][begin : begin + 5]) == list(range(5))
    assert model.seen["first"][:22] != model.seen["first"][22:]


def _train_two(rank, world_size):
    with strategies.get("mirrored", launch=False) as strategy:
        stream = Stream([0, 1], lambda shard: numbers(24)[12 * shard : 12 * shard + 12], lengths=12, window=4)
        trainer = train_two(strategy, DataLoader(stream, 4, shuffle=True), DataLoader(numbers(6), 2, shuffle=True))
        return trainer.strategy.bare_model.seen, trainer.step


def test_several_loaders_are_divided_among_ranks():
    found = run_ranks(_train_two, 2)
    assert [step for _, step in found] == [6, 6]
    assert sorted(found[0][0]["first"] + found[1][0]["first"]) == list(range(24))
    assert sorted(found[0][0]["second"] + found[1][0]["second"]) == sorted([*range(6)] * 2)


@pytest.mark.parametrize("seed", range(12))
def test_one_of_several_loaders_that_drops_a_short_batch_makes_all_batches_full(seed):
    """`drop_last=True` of a loader in a dict was ignored: it gave a short batch, and so did one that goes round."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 30) for _ in range(2)]
    batches = [draw.choice([1, 2, 3, 4, 6]) for _ in range(2)]
    drops = draw.choice([(True, False), (False, True), (True, True)])
    loaders = [
        DataLoader(numbers(size), batch, shuffle=draw.random() < 0.5, drop_last=drop)
        for size, batch, drop in zip(sizes, batches, drops, strict=True)
    ]
    steps = max(size // batch for size, batch in zip(sizes, batches, strict=True))
    if not steps:
        with pytest.raises(ValueError, match="none of its datasets has a full one"):
            train_two(strategies.SingleDeviceStrategy("cpu"), *loaders)
        return
    trainer = train_two(strategies.SingleDeviceStrategy("cpu"), *loaders, max_epochs=2)
    model = trainer.strategy.bare_model
    assert model.sizes == [tuple(batches)] * (2 * steps)
    for name, size, batch in zip(("first", "second"), sizes, batches, strict=True):
        seen = model.seen[name]
        if size // batch == steps:  # each of its samples once at most in an epoch
            for epoch in (seen[: steps * batch], seen[steps * batch :]):
                assert len(set(epoch)) == steps * batch
        else:  # it goes round
            for begin in range(0, len(seen) - size + 1, size):
                assert sorted(seen[begin : begin + size]) == list(range(size))


def _train_dropping(rank, world_size):
    with strategies.get("mirrored", launch=False) as strategy:
        first, second = DataLoader(numbers(22), 4, drop_last=True), DataLoader(numbers(5), 2, shuffle=True)
        model = train_two(strategy, first, second).strategy.bare_model
        return model.seen, model.sizes


def test_ranks_share_full_batches_where_a_loader_drops_a_short_one():
    found = run_ranks(_train_dropping, 2)
    assert [sizes for _, sizes in found] == [[(2, 1)] * 5] * 2
    assert sorted(found[0][0]["first"] + found[1][0]["first"]) == list(range(20))
    assert sorted(found[0][0]["second"] + found[1][0]["second"]) == sorted([*range(5)] * 2)


def test_several_validations_are_measured_by_name():
    trainer = make(metrics={"error": lambda result, target: (result - target).abs()})
    trainer.fit(DataLoader(make_data(), 16), {"a": DataLoader(make_data(10), 4), "b": DataLoader(Iterated(7), 4)})
    assert list(trainer.metrics) == ["a/loss", "a/error", "b/loss", "b/error"]
    assert trainer.metrics["b/loss"] == pytest.approx(trainer.validate(DataLoader(make_data(7), 4))["loss"])


@pytest.mark.parametrize(
    ("loader", "error", "words"),
    [
        (lambda: DataLoader(Iterated(0), 4), ValueError, "loader has no batch, in epoch 1"),
        (
            lambda: lambda context: iter([1]),
            TypeError,
            "must return an iterable for all epochs, such as a DataLoader, got a list_iterator",
        ),
        (lambda: lambda context: 3, TypeError, "the function of loader must return an iterable .* got a int"),
        (lambda: {}, ValueError, "loader is an empty dict"),
        (
            lambda: {"a": DataLoader(numbers(3), 4, drop_last=True)},
            ValueError,
            r"no batch: none of its datasets has a full one \(a: 3 samples, 4 in a batch\)",
        ),
        (lambda: {"a": [1]}, TypeError, r"loader\['a'\] must be a torch.utils.data.DataLoader by name, got a list"),
        (lambda: {"a": DataLoader(Iterated(4), 2)}, TypeError, r"loader\['a'\] is over an IterableDataset"),
        (lambda: {"a": DataLoader(numbers(0), 2)}, ValueError, r"loader\['a'\] has no batch: its dataset is empty"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_what_to_do(loader, error, words):
    with pytest.raises(error, match=words):
        make(max_epochs=1).fit(loader())


def test_the_progress_line_counts_samples_also_where_nobody_knows_how_many_come(capsys):
    trainer = make(show_progress=True)
    trainer.fit(DataLoader(Iterated(20), 5))
    assert re.search(r"epoch 1/1: 20 samples in", capsys.readouterr().out)
