"""LocalSGD and DiLoCo, over real ranks, against replicas in one process."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal, assert_same_on_all_ranks
from tests.on_ranks import on_ranks
from tests.optim.replicas import Replica, floats, inner_of, outer_of, train_step
from tests.training import copy_parameters, copy_state
from torch import nn

import phalanx
from phalanx.testing import run_ranks

SYNC_EVERY = 3


def _local(model, optimizer, **options):
    return phalanx.LocalSGD(model, optimizer, **{"sync_every": SYNC_EVERY, **options})


def _diloco(model, optimizer, **options):
    return phalanx.DiLoCo(model, optimizer, outer_of(model), **{"sync_every": SYNC_EVERY, **options})


KINDS = {"local": _local, "diloco": _diloco, "diloco on cpu": lambda *a, **o: _diloco(*a, backup_device="cpu", **o)}


@pytest.mark.parametrize("kind", ["local", "diloco"])
def test_a_rank_that_dies_in_a_round_leaves_the_others_what_they_had(kind):
    def fn(rank, world_size):
        model = Replica()
        optimizer = inner_of(model)
        rounds = KINDS[kind](model, optimizer)
        for step in range(SYNC_EVERY - 1):
            train_step(model, optimizer, rank, step)
        if rank == 1:  # between the first collective of the round and the second
            rounds._combine = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
        seen = []
        rounds._flat.copy_in, copy_in = (lambda: (seen.append(floats(model)), copy_in())), rounds._flat.copy_in
        with pytest.raises(phalanx.PeerLostError, match="rank 1"):
            train_step(model, optimizer, rank, SYNC_EVERY - 1)
        assert_equal(floats(model), seen[0])
        return True

    assert run_ranks(fn, 3, lost=(1,)) == [True, None, True]


@pytest.mark.parametrize("kind", ["local", "diloco"])
@on_ranks(2)
def test_a_saved_state_goes_on_bit_for_bit(rank, kind):
    def start():
        model = Replica()
        optimizer = inner_of(model)
        return model, optimizer, KINDS[kind](model, optimizer)

    def train(model, optimizer, steps):
        for step in steps:
            train_step(model, optimizer, rank, step)

    model, optimizer, rounds = start()
    train(model, optimizer, range(10))
    rounds.finish()
    straight = floats(model)

    model, optimizer, rounds = start()
    train(model, optimizer, range(5))  # in the middle of the second round
    saved = [one.state_dict() for one in (model, optimizer, rounds)]
    assert saved[2]["local_steps"] == 2
    model, optimizer, rounds = start()
    for one, state in zip((model, optimizer, rounds), saved, strict=True):
        one.load_state_dict(state)
    train(model, optimizer, range(5, 10))
    rounds.finish()
    assert_equal(floats(model), straight)


@on_ranks(2)
def test_outer_parameters_are_the_model_of_the_last_round(rank):
    model = Replica()
    optimizer = inner_of(model)
    rounds = _diloco(model, optimizer)
    for step in range(4):
        train_step(model, optimizer, rank, step)
        if step == 2:
            after_round = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
            kept = model.conv.weight.grad
    assert kept is not None  # the user's gradient is back where it was
    outer = rounds.outer_parameters()
    assert_equal(outer, after_round)
    assert not torch.equal(outer["conv.weight"], model.conv.weight)


def test_what_already_keeps_the_same_ranks_together_is_refused():
    def fn(rank, world_size):
        model = phalanx.DistributedDataParallel(Replica())
        with pytest.raises(
            ValueError, match=r"LocalSGD: DistributedDataParallel already synchronizes ranks \[0, 1, 2, 3\]"
        ):
            _local(model, inner_of(model))
        model = nn.parallel.DistributedDataParallel(Replica())
        with pytest.raises(ValueError, match="DiLoCo: DistributedDataParallel already synchronizes ranks"):
            _diloco(model, inner_of(model))
        model = Replica()
        sharded = phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="LocalSGD: ZeroRedundancyOptimizer already synchronizes ranks"):
            _local(model, sharded)
        # Within a pair at every step, between pairs every third: the groups have one rank in common.
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        model = phalanx.DistributedDataParallel(Replica(), process_group=pairs[rank // 2])
        optimizer = inner_of(model)
        with _local(model, optimizer, process_group=across[rank % 2]):
            for step in range(4):
                train_step(model, optimizer, rank, step)
        return copy_parameters(model)

    assert_same_on_all_ranks(run_ranks(fn, 4))


@on_ranks(2)
def test_ranks_that_differ_are_told_how(rank):
    model = nn.Linear(3, 2)
    with pytest.raises(phalanx.MismatchError, match=r"rank 1 has sync_every=3, rank 0 has sync_every=2"):
        _local(model, inner_of(model), sync_every=2 + rank)
    model = nn.Linear(3 + rank, 2)
    with pytest.raises(phalanx.MismatchError, match=r"rank 1 has the tensor \('weight', \(2, 4\), 'float32'\)"):
        _local(model, inner_of(model))


@on_ranks(1)
def test_wrong_arguments_are_refused():
    model = nn.Linear(3, 2)
    inner = inner_of(model)
    for wrong in (0, -1, 2.5, "3"):
        with pytest.raises(ValueError, match=f"LocalSGD: sync_every must be a number of steps, .* got {wrong!r}"):
            _local(model, inner, sync_every=wrong)
    with pytest.raises(ValueError, match="LocalSGD: the model has no parameter that requires a gradient"):
        _local(nn.Linear(1, 1).requires_grad_(False), inner)
    with pytest.raises(ValueError, match="DiLoCo: the inner and the outer optimizer must be two"):
        phalanx.DiLoCo(model, inner, inner, sync_every=2)
    for make in (_local, _diloco):
        with pytest.raises(ValueError, match="SGD holds no parameter of this model, so the model would never change"):
            make(model, inner_of(nn.Linear(3, 2)))
    for words, make in (
        (r"LocalSGD: model must be a torch\.nn\.Module, got SGD", lambda: _local(inner, model)),
        (r"LocalSGD: the optimizer must be a torch\.optim\.Optimizer, got \[SGD", lambda: _local(model, [inner])),
        (
            r"DiLoCo: the optimizer must be .* got <class",
            lambda: phalanx.DiLoCo(model, inner, torch.optim.SGD, sync_every=2),
        ),
    ):
        with pytest.raises(TypeError, match=words):
            make()
    for outer, words in (  # at the first round these ended in a TypeError
        (torch.optim.LBFGS(model.parameters()), "LBFGS cannot be the outer optimizer: its step needs a closure"),
        (torch.optim.SparseAdam(model.parameters()), "SparseAdam cannot be .* it takes only sparse gradients"),
        (
            torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))], lr=1.0),
            r"the outer optimizer holds a parameter of shape \(7,\) that is not the model",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            phalanx.DiLoCo(model, inner, outer, sync_every=2)
    with pytest.raises(ValueError, match="DiLoCo: the outer optimizer does not hold parameter 'bias'"):
        phalanx.DiLoCo(model, inner, torch.optim.SGD([model.weight], lr=1.0), sync_every=2)
    rounds = phalanx.DiLoCo(model, inner, outer_of(model), sync_every=2)
    state = rounds.state_dict()
    state["outer_parameters"] = {**state["outer_parameters"], "weight": torch.zeros(2, 4)}
    with pytest.raises(ValueError, match=r"parameter 'weight' with shape \(2, 4\), the model with \(2, 3\)"):
        rounds.load_state_dict(state)
    state["outer_parameters"] = {"weight": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=r"parameter 'bias' with shape None, the model with \(2,\)"):
        rounds.load_state_dict(state)


def test_without_a_process_group_it_says_so():
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="LocalSGD needs a process group"):
        _local(model, inner_of(model))


@on_ranks(2)
def test_an_exception_ends_the_block_without_a_round(rank):
    model = Replica()
    optimizer = inner_of(model)
    rounds = _local(model, optimizer)
    train_step(model, optimizer, rank, 0)
    with pytest.raises(KeyError), rounds:
        raise KeyError("the user's own")
    train_step(model, optimizer, rank, 1)
    assert (rounds.local_steps, rounds.num_rounds) == (1, 0)


@pytest.mark.slow
def test_ranks_that_stand_at_different_rounds_after_a_loss_go_on_from_the_later_one():
    """A rank died at the very end of a round: one survivor had it done, the other had not.

    DiLoCo's outer parameters then differed for good, as each rank's round out of turn began from its own.
    """

    def fn(rank, world_size):
        seen = {}
        for kind, make in KINDS.items():
            model = Replica()
            optimizer = inner_of(model)
            rounds = make(model, optimizer)
            for step in range(7):
                train_step(model, optimizer, rank, step)
            before = rounds.state_dict()
            for step in range(7, 13):
                train_step(model, optimizer, rank, step)
            if rank == 1:  # as if it had not done them
                rounds.load_state_dict(before)
            rounds.regroup(dist.group.WORLD)
            rounds.catch_up(is_new=False)
            for step in range(13, 20):
                train_step(model, optimizer, rank, step)
            seen[kind, "rounds"] = rounds.num_rounds
            if kind != "local":
                seen[kind] = [value.clone() for value in rounds.outer_parameters().values()]
            rounds.finish()
            seen[kind, "end"] = floats(model)
        return seen

    assert_same_on_all_ranks(run_ranks(fn, 3))


def test_a_round_that_only_some_have_missed_moves_the_outer_parameters_once():
    """Those who had done it counted in the round out of turn: without a movement, momentum moved them once more."""

    def fn(rank, world_size):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        rounds = phalanx.DiLoCo(model, inner, outer_of(model), sync_every=2)
        draw = torch.Generator().manual_seed(rank)
        for _ in range(4):
            before = rounds.state_dict()
            model(torch.randn(5, 3, generator=draw)).sum().backward()
            if rank == 1:
                missed = copy_state(model)
            inner.step()
            inner.zero_grad()
        done = floats(model)
        if rank == 1:  # as if the last round had ended without it: it has its own steps, and the round before
            rounds.load_state_dict(before)
            model.load_state_dict(missed)
        rounds.regroup(dist.group.WORLD)
        rounds.catch_up(is_new=False)
        assert (rounds.num_rounds, rounds.local_steps) == (2, 0)
        return floats(model), done, [one.clone() for one in rounds.outer_parameters().values()]

    ended = run_ranks(fn, 3)
    for model, _, outer in ended:
        assert_equal(model, ended[0][1])
        assert_equal(outer, ended[0][2])
