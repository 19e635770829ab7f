"""Ranks that run out of data before others: if asked for, the others go on, and all end with the same weights."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_same_on_all_ranks
from tests.ddp.models import batch_of, small_model
from tests.logs import logged
from tests.training import copy_state, mean_square, train
from torch import nn

import phalanx
from phalanx.ddp.uneven import decide_source, describe
from phalanx.errors import MismatchError, PeerLostError
from phalanx.testing import RankFailed, faults, run_ranks

DistributedDataParallel = functools.partial(phalanx.DistributedDataParallel, uneven_inputs=True)


def _alone(model, counts, epochs):
    """One process that averages over the ranks that have a batch left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(epochs):
        for step in range(max(counts)):
            optimizer.zero_grad()
            present = [rank for rank, count in enumerate(counts) if step < count]
            for rank in present:
                (mean_square(model(batch_of(rank, epoch, step))) / len(present)).backward()
            optimizer.step()
    return model


def _train(ddp, optimizer, rank, counts, epoch):
    train(ddp, optimizer, [batch_of(rank, epoch, step) for step in range(counts[rank])])


def _train_and_meet(ddp, optimizer, rank, counts):
    _train(ddp, optimizer, rank, counts, 0)
    dist.barrier()


def _meet(epoch):
    """Something else at every epoch's end: whatever it is, all meet there."""
    world_size, ones = dist.get_world_size(), torch.ones(3)
    kind = epoch % 5
    if kind == 0:
        dist.barrier()
    elif kind == 1:
        dist.all_reduce(ones)
        assert torch.equal(ones, torch.full((3,), float(world_size)))
    elif kind == 2:
        ranks = [None] * world_size
        dist.all_gather_object(ranks, dist.get_rank())
        assert ranks == list(range(world_size))
    elif kind == 3:
        sent = torch.arange(float(world_size))
        got = torch.empty(world_size)
        dist.all_to_all_single(got, sent)
        assert torch.equal(got, torch.full((world_size,), float(dist.get_rank())))
    else:
        dist.monitored_barrier()


@pytest.mark.parametrize("counts", [[2, 1], [0, 2], [3, 1, 2], [2, 0, 4, 1]])
def test_the_mean_is_over_the_ranks_that_have_data_and_all_end_with_the_same_weights(counts):
    epochs = 5

    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model(), bucket_cap_mb=0.0001)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        after = []
        for epoch in range(epochs):
            _train(ddp, optimizer, rank, counts, epoch)
            _meet(epoch)
            after.append(copy_state(ddp.module))  # right after the collective, nothing in between
        phalanx.check_replicas(ddp)
        return after

    results = run_ranks(fn, len(counts))
    for epoch in range(epochs):
        assert_same_on_all_ranks([after[epoch] for after in results])
    torch.testing.assert_close(results[0][-1], copy_state(_alone(small_model(), counts, epochs)))


def test_more_ranks_than_cores_and_large_buckets_meet_as_well():
    counts = [1, 3, 2, 0]

    def fn(rank, world_size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3001), nn.Linear(3001, 301))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)
        for epoch in range(2):
            _train(ddp, optimizer, rank, counts, epoch)
            dist.barrier()
        return copy_state(ddp.module)

    assert_same_on_all_ranks(run_ranks(fn, 4))


def test_one_line_says_who_ran_out_of_data_and_where_it_waits():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model(), check=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        with logged("phalanx.ddp") as lines:
            for epoch in range(2):
                _train(ddp, optimizer, rank, [4, 2, 4], epoch)
                dist.barrier()
        return lines

    lines = run_ranks(fn, 3)
    assert lines[1] == lines[2] == []
    (line,) = lines[0]
    assert line.startswith("rank 1 ran out of data after 2 steps (rank 1 is in barrier #")
    assert "test_uneven.py:" in line
    assert line.endswith("; ranks 0, 2 go on, averaging over those that are left")


# -- with everything that a step may contain ---------------------------------------------------------------------------


def test_buffers_come_from_the_lowest_rank_that_trains():
    def fn(rank, world_size):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        for epoch in range(2):
            _train(ddp, optimizer, rank, [1, 2, 4], epoch)
            dist.barrier()
        return copy_state(ddp.module)

    results = run_ranks(fn, 3)
    assert_same_on_all_ranks(results)
    assert results[0]["1.num_batches_tracked"] == 2 * 4


def test_evaluation_waits_for_the_final_weights_where_there_are_buffers():
    def fn(rank, world_size):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        _train(ddp, optimizer, rank, [3, 1], 0)
        ddp.eval()
        with torch.no_grad():
            return ddp(batch_of(7, 7, 7))

    first, second = run_ranks(fn, 2)
    assert torch.equal(first, second)


@pytest.mark.parametrize("choice", [True, "auto"])
def test_batchnorm_over_ranks_counts_those_that_train(choice):
    counts = [0, 3, 1]

    def fn(rank, world_size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        ddp = DistributedDataParallel(model, sync_batchnorm=choice)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        for epoch in range(2):
            _train(ddp, optimizer, rank, counts, epoch)
            dist.barrier()
        return copy_state(ddp.module)

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.2)
    for epoch in range(2):
        steps = range(max(counts))
        together = [torch.cat([batch_of(r, epoch, step) for r in range(3) if step < counts[r]]) for step in steps]
        train(alone, optimizer, together)
    results = run_ranks(fn, 3)
    assert_same_on_all_ranks(results)
    torch.testing.assert_close(results[0], copy_state(alone), rtol=1e-4, atol=1e-5)


class _Branches(nn.Module):
    """Uses another branch at each step; the third one never, and the embedding's gradient is sparse."""

    def __init__(self, *, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(6, 5, sparse=sparse)
        self.branches = nn.ModuleList(nn.Linear(5, 2) for _ in range(3))

    def forward(self, inputs, branch):
        rows = (inputs[:, 0] * 10).long() % 6
        return self.branches[branch](inputs + self.embedding(rows))


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}, {"sparse": True}])
def test_unused_parameters_static_graphs_and_sparse_gradients(options):
    options = dict(options)
    sparse = options.pop("sparse", False)
    if sparse:
        options["find_unused_parameters"] = True
    counts, epochs = [1, 3, 0], 2
    branch_of = (lambda step: 0) if "static_graph" in options else (lambda step: step % 2)

    def fn(rank, world_size):
        ddp = DistributedDataParallel(_Branches(sparse=sparse), **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        for epoch in range(epochs):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                mean_square(ddp(batch_of(rank, epoch, step), branch_of(step))).backward()
                optimizer.step()
            dist.barrier()
        return copy_state(ddp.module)

    alone = _Branches()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.2)
    for epoch in range(epochs):
        for step in range(max(counts)):
            optimizer.zero_grad()
            present = [rank for rank in range(3) if step < counts[rank]]
            for rank in present:
                (mean_square(alone(batch_of(rank, epoch, step), branch_of(step))) / len(present)).backward()
            optimizer.step()
    results = run_ranks(fn, 3)
    assert_same_on_all_ranks(results)
    torch.testing.assert_close(results[0], copy_state(alone))


def test_steps_of_several_batches():
    """Rank 1 has 2 steps of two batches, rank 0 has 3."""

    def fn(rank, world_size):
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        for step in range([3, 2][rank]):
            optimizer.zero_grad()
            with ddp.no_sync():
                mean_square(ddp(batch_of(rank, 0, step))).backward()
            mean_square(ddp(batch_of(rank, 1, step))).backward()
            optimizer.step()
        dist.barrier()
        return copy_state(ddp.module)

    assert_same_on_all_ranks(run_ranks(fn, 2))


def test_two_wrappers_over_one_group_one_of_which_is_forgotten_on_one_rank():
    def fn(rank, world_size):
        first, second = DistributedDataParallel(small_model()), DistributedDataParallel(small_model())
        third = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.2)
        for step in range([1, 3][rank]):
            optimizer.zero_grad()
            mean_square(first(batch_of(rank, 0, step))).backward()
            mean_square(second(batch_of(rank, 1, step))).backward()
            optimizer.step()
        if rank == 0:
            del third
        dist.barrier()
        return copy_state(first.module), copy_state(second.module)

    assert_same_on_all_ranks(run_ranks(fn, 2))


# -- leaving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_may_leave_when_it_has_no_more_data(world_size):
    counts = [1, 3, 2, 3][:world_size]

    def fn(rank, world_size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 2000), nn.BatchNorm1d(2000), nn.Linear(2000, 3))
        ddp = DistributedDataParallel(model, sync_batchnorm=True, find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        dist.barrier()
        _train(ddp, optimizer, rank, counts, 0)
        weights = copy_state(ddp.module)
        dist.destroy_process_group()
        return weights

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(5, 2000), nn.BatchNorm1d(2000), nn.Linear(2000, 3))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    steps = range(3)
    together = [torch.cat([batch_of(r, 0, step) for r, count in enumerate(counts) if step < count]) for step in steps]
    train(alone, optimizer, together)
    results = run_ranks(fn, world_size)
    last = [weights for weights, count in zip(results, counts, strict=True) if count == 3]
    assert_same_on_all_ranks(last)
    torch.testing.assert_close(last[0], copy_state(alone), rtol=1e-4, atol=1e-5)


def test_who_waits_for_a_rank_that_has_left_hears_it():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        _train(ddp, optimizer, rank, [1, 2, 2], 0)
        if rank == 0:
            dist.destroy_process_group()
            return
        with pytest.raises(PeerLostError, match=r"rank 0 .* is gone: it left the group"):
            dist.barrier()

    run_ranks(fn, 3)


def test_a_rank_that_leaves_because_of_an_error_has_not_run_out_of_data():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        dist.barrier()
        if rank == 1:
            with pytest.raises(ZeroDivisionError):
                _fail_and_clean_up()
            return
        with pytest.raises(PeerLostError, match="rank 1"):
            _train(ddp, optimizer, rank, [2, 2], 0)

    run_ranks(fn, 2)


def _fail_and_clean_up():
    try:
        1 / 0  # noqa: B018 - the user's bug
    finally:
        dist.destroy_process_group()


# -- mistakes and losses are still told --------------------------------------------------------------------------------


def test_ranks_that_never_meet_again_hear_of_both_places():
    """`if rank == 0: evaluate()` with a collective in it, in the middle of training."""

    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        _train(ddp, optimizer, rank, [2, 2], 0)

        def go_on():
            if rank == 0:
                dist.all_reduce(torch.ones(1))
            _train(ddp, optimizer, rank, [2, 2], 1)
            dist.barrier()

        with pytest.raises(MismatchError) as caught:
            go_on()
        assert caught.value.calls[0].startswith("all_reduce(SUM)")
        assert caught.value.calls[1].startswith("barrier")
        assert "Rank 0 was out of the last 2 training steps" in str(caught.value)

    run_ranks(fn, 2)


@pytest.mark.parametrize("call", ["barrier", "all_reduce", "all_gather_object"])
def test_a_call_under_if_rank_0_is_told_in_the_step_in_which_it_happens(call):
    """It was "ran out of data": the others trained on alone for epochs, and the error in the end named neither line."""

    def fn(rank, world_size):
        ddp = phalanx.DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        steps = 0

        def train():
            nonlocal steps
            for step in range(10):
                if rank == 0 and step == 3:
                    if call == "barrier":
                        dist.barrier()
                    elif call == "all_reduce":
                        dist.all_reduce(torch.ones(1))
                    else:
                        dist.all_gather_object([None] * world_size, rank)
                _train(ddp, optimizer, rank, [1] * world_size, step)
                steps += 1
            dist.barrier()

        with pytest.raises(MismatchError) as caught:
            train()
        assert steps == 3
        assert f"rank 0: {'all_gather' if 'gather' in call else call}" in str(caught.value)
        assert "rank 1: gradients" in str(caught.value)
        assert len(re.findall(r"(?:test_uneven|training)\.py:\d", str(caught.value))) >= 3  # the line of each rank
        return str(caught.value)

    run_ranks(fn, 3)


def test_who_asked_for_it_meets_at_one_line():
    """A barrier of rank 0 alone and one of all others later matched by chance, and weights were taken over there."""

    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        _train(ddp, optimizer, rank, [2, 2], 0)

        def go_on():
            if rank == 0:
                dist.barrier()
            _train(ddp, optimizer, rank, [2, 2], 1)
            dist.barrier()

        with pytest.raises(MismatchError) as caught:
            go_on()
        places = [call.split("test_uneven.py:")[1] for call in caught.value.calls.values()]
        assert places[0] != places[1]
        assert "to the same line" in str(caught.value)

    run_ranks(fn, 2)


def test_a_rank_that_left_a_step_half_done_has_not_run_out_of_data():
    def fn(rank, world_size):
        model = small_model()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.00001)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        _train(ddp, optimizer, rank, [2, 2], 0)
        if rank == 1:
            model[0].weight.register_hook(lambda grad: 1 / 0)
            loss = mean_square(ddp(batch_of(0, 0, 0)))
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        with pytest.raises(MismatchError):
            _train_and_meet(ddp, optimizer, rank, [1, 0])

    run_ranks(fn, 2)


def test_a_collective_in_the_background_is_no_place_to_wait():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)

        def go_on():
            _train(ddp, optimizer, rank, [1, 2], 0)
            if rank == 0:
                dist.all_reduce(torch.ones(3), async_op=True).wait()
            dist.barrier()

        with pytest.raises(MismatchError):
            go_on()

    run_ranks(fn, 2)


def test_who_meets_in_the_background_makes_no_step_before_all_are_up_to_date():
    # A rank that had trained on met the others in an asynchronous all_reduce and went on to its next step, which began
    # before the others had taken over the number of its rounds: it trained alone, and so did they, unheard.
    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        in_step = threading.Event()
        if rank == 0:
            uneven = dist.group.WORLD._uneven_inputs
            rejoin = uneven.rejoin

            def rejoin_late():
                in_step.wait(0.5)  # never set where the step waits; a bound on how long it is tried
                rejoin()

            uneven.rejoin = rejoin_late
        _train(ddp, optimizer, rank, [4, 2], 0)
        total = torch.ones(3)
        work = dist.all_reduce(total, async_op=rank == 0)
        _train(ddp, optimizer, rank, [2, 2], 1)
        in_step.set()
        if work is not None:
            work.wait()
        assert torch.equal(total, torch.full((3,), 2.0))
        return ddp._reducer.rounds[0], copy_state(ddp.module)

    (rounds, first), (other_rounds, second) = run_ranks(fn, 2)
    assert rounds == other_rounds == 6
    assert_same_on_all_ranks([first, second])


def test_it_must_be_asked_for():
    def fn(rank, world_size):
        ddp = phalanx.DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        with pytest.raises(MismatchError, match=r"uneven_inputs=True .*Join"):
            _train_and_meet(ddp, optimizer, rank, [1, 2])

    run_ranks(fn, 2)


def test_one_copy_of_the_parameters_for_all_ranks_needs_all_ranks():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model())
        optimizer = phalanx.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.2)
        with pytest.raises(MismatchError) as caught:
            _train_and_meet(ddp, optimizer, rank, [1, 2])
        if rank == 1:
            assert "rank 0 ran out of data after 1 step," in str(caught.value)
            assert "ZeroRedundancyOptimizer" in str(caught.value)
            assert "drop_last" in str(caught.value)

    run_ranks(fn, 2)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_while_somebody_is_out_is_a_lost_peer(victim):
    """Rank 0 is out from the start; rank 1 trains, and one of them dies."""
    fault = faults.kill(rank=1, step=2)

    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)

        def go_on():
            if rank == 0:
                _tell_pid()
                dist.barrier()
            for step in range(200):
                if victim == 1:
                    fault.strike(rank, step)
                optimizer.zero_grad()
                mean_square(ddp(batch_of(rank, 0, step))).backward()
                optimizer.step()
                if victim == 0 and step == 5 and rank == 1:
                    _kill_the_one_that_waits()

        with pytest.raises(PeerLostError, match=f"rank {victim}"):
            go_on()

    run_ranks(fn, 3, lost=(victim,))


def _tell_pid():
    dist.group.WORLD._store.set("pid", str(os.getpid()))


def _kill_the_one_that_waits():
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(dist.group.WORLD._store.get("pid")), signal.SIGKILL)


# -- the pure part -----------------------------------------------------------------------------------------------------


def test_the_source_is_the_lowest_rank_that_made_the_most_steps():
    assert decide_source([3, 3, 3]) is None
    assert decide_source([2, 5, 3, 5]) == 1
    assert decide_source([7]) is None


def test_the_line_for_one_rank_and_for_several():
    assert describe([2], [0, 1], 12, ["has left"]) == (
        "rank 2 ran out of data after 12 steps (rank 2 has left); ranks 0, 1 go on, averaging over those that are left"
    )
    assert describe([0, 1], [2], 1, ["a", "b"]).endswith("; rank 2 goes on, averaging over those that are left")


def test_run_ranks_tells_of_a_rank_that_fails_while_others_train():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        if rank == 0:
            raise ValueError("no such file")
        _train(ddp, optimizer, rank, [0, 2], 0)

    with pytest.raises(RankFailed) as caught:
        run_ranks(fn, 2)
    assert isinstance(caught.value.errors[0], ValueError)
    assert isinstance(caught.value.errors[1], PeerLostError)
