"""The Trainer under every strategy: generated short jobs against one process, and resumption inside of an epoch."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from tests.small_models import make_data, mlp
from tests.trainer.trainers import weights
from tests.training import copy_parameters
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import phalanx
from phalanx import strategies
from phalanx.strategies.per_rank_state import PerRankState
from phalanx.testing import run_ranks
from phalanx.trainer import EarlyStopping

ALIKE = {  # the mathematics of one process
    "mirrored": {},
    "multi_worker_mirrored": {},
    "sharded": {},
    "sharded model": {"shard": "model"},
    "pipeline": {"micro_batches": 2},
}
APART = {  # other mathematics
    "local_sgd": {"sync_every": 3},
    "diloco": {"sync_every": 3},
}


def make_model():
    return mlp((6, 16, 16, 1), activation=nn.ReLU, seed=1)


def get(word):
    return strategies.get(word.partition(" ")[0], **(ALIKE | APART)[word])


def fit(strategy, size, val_size, **options):
    trainer = phalanx.Trainer(
        make_model(),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        F.mse_loss,
        strategy=strategy,
        metrics={"error": lambda result, target: (result - target).abs()},
        show_progress=False,
        **options,
    )
    trainer.fit(DataLoader(make_data(size), 16, shuffle=True), DataLoader(make_data(val_size), 8))
    return trainer


def generate(count):
    draw = random.Random(5)
    for _ in range(count):
        yield {
            "size": draw.choice([32, 96, 128]),
            "val_size": draw.choice([1, 7, 24, 37]),
            "max_epochs": draw.choice([1, 2]),
            "accumulate": draw.choice([1, 1, 2, 3]),
            "max_norm": draw.choice([None, 0.5]),
            "precision": draw.choice(["32-true", "32-true", "bf16-mixed"]),
        }


@pytest.mark.slow
def test_every_strategy_ends_with_the_metrics_of_one_process():
    cases = list(generate(4))
    alone = [fit(strategies.SingleDeviceStrategy("cpu"), **case) for case in cases]

    def train(rank, world_size):
        seen = {}
        for (number, case), word in itertools.product(enumerate(cases), ALIKE):
            if word == "pipeline" and case["accumulate"] > 1:  # which has micro-batches for that
                continue
            trainer = fit(get(word), **case)
            seen[number, word] = (trainer.step, dict(trainer.metrics))
            trainer.strategy.close()
        return seen

    for seen in run_ranks(train, 2):
        for (number, word), (step, metrics) in seen.items():
            case, expected = cases[number], alone[number]
            rough = case["precision"] != "32-true"
            assert step == expected.step, (word, case)
            assert metrics == pytest.approx(expected.metrics, rel=5e-2 if rough else 1e-4), (word, case)


@pytest.mark.slow
def test_every_strategy_resumes_inside_of_an_epoch_to_the_same_bits(tmp_path):
    """Under those that train apart each rank went on with the model and the optimizer of rank 0."""

    def train(rank, world_size):
        ends = {}
        for word in {**ALIKE, **APART}:
            for folder, steps in (("whole", None), ("cut", 5), ("cut", None)):
                saved = {"checkpoint": tmp_path / word, "save_every": 5, "max_steps": steps} if folder == "cut" else {}
                trainer = fit(get(word), 128, 10, seed=4, **saved)
                trainer.strategy.finish()
                if word in ("pipeline", "sharded model"):
                    ends[word, folder] = torch.tensor(list(trainer.metrics.values()))
                else:
                    ends[word, folder] = weights(trainer)
                trainer.strategy.close()
            assert torch.equal(ends[word, "cut"], ends[word, "whole"]), word
        return ends

    first, second = run_ranks(train, 2)
    assert_equal(first, second)


@on_ranks(2)
def test_every_strategy_stops_early_on_all_ranks():
    ends = {}
    for word in {**ALIKE, **APART}:
        stopping = EarlyStopping(patience=1, min_delta=1e6)
        trainer = fit(get(word), 32, 9, max_epochs=9, callbacks=[stopping])
        ends[word] = (trainer.epoch, trainer.step)
        trainer.strategy.close()
    assert set(ends.values()) == {(2, 4)}


@on_ranks(2)
def test_callbacks_go_on_where_the_ranks_of_one_strategy_differ_and_those_of_the_other_do_not(rank):
    """A checkpoint of mirrored ranks ended a run with shard="model" in a KeyError, and the other way round was lost."""

    def part(best, **how):
        state = {"best": best}
        callback = SimpleNamespace(state_dict=state.copy, load_state_dict=state.update)
        return state, PerRankState({"callbacks": callback}, None, **how)

    def of_rank_0(state):
        states = [state]
        dist.broadcast_object_list(states, 0)
        return states[0]

    _, alike = part(3, differ=False)
    found, apart = part(0)
    apart.load_state_dict(of_rank_0(alike.state_dict()))
    assert found == {"best": 3}
    _, apart = part(10 + rank)
    found, alike = part(0, differ=False)
    alike.load_state_dict(of_rank_0(apart.state_dict()))
    assert found == {"best": 10}, "all go on with rank 0's"


@pytest.mark.slow
@on_ranks(2)
def test_each_rank_goes_on_with_its_own_where_each_writes_its_shards(rank, tmp_path):
    """Rank 0 went on with another rank's model: the parts "model" of all were taken for replicas of one.

    And a checkpoint of before ranks that train apart each had their own, with the rounds alone, ended in a KeyError.
    """
    for word in APART:
        strategy = get(word)
        model, _ = strategy.setup(make_model(), lambda p: torch.optim.Adam(p, lr=0.1), F.mse_loss)
        draw = torch.Generator().manual_seed(rank)
        with phalanx.CheckpointManager(tmp_path / word, sharded=True) as manager:
            for _ in range(7):
                strategy.step(torch.randn(4, 6, generator=draw), torch.randn(4, 1, generator=draw))
            manager.save(7, strategy.parts())
            kept = copy_parameters(model)
            old = strategy.training_objects()["rounds"].state_dict()
            for _ in range(2):
                strategy.step(torch.randn(4, 6, generator=draw), torch.randn(4, 1, generator=draw))
            manager.load(strategy.parts())
        assert_equal(copy_parameters(model), kept, word)
        strategy.step(torch.randn(4, 6, generator=draw), torch.randn(4, 1, generator=draw))
        strategy.parts()["rounds"].load_state_dict(old)
        assert strategy.training_objects()["rounds"].local_steps == old["local_steps"], word
        strategy.close()
