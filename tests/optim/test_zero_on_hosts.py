"""On several hosts each host shares the update among its ranks: the plain optimizer's bits, and nothing is sent."""

import itertools

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import all_equal
from tests.optim.models import Uneven, backward, train, wrapped
from tests.system.hosts_jobs import on_hosts
from tests.training import copy_parameters
from torch import nn, optim

import phalanx
from phalanx import ZeroRedundancyOptimizer
from phalanx.elastic.state import commits_of
from phalanx.optim import merge_state_dicts
from phalanx.testing import RankFailed, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

STEPS = 3


def _clip(module):
    nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def _trains_as_the_plain_one(rank, world_size, machines):
    """Train with optimizers whose parameters are cut between ranks, and with one that gets whole ones (Adafactor)."""
    cases = [(optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.AdamW, {"fused": True}), (optim.Adafactor, {})]
    for (kind, options), is_first in itertools.product(cases, (False, True)):
        plain = wrapped()
        expected = train(plain, kind(plain.parameters(), **options), rank, STEPS, before_step=_clip)
        # Ranks that differ before take rank 0's values, whichever wrapper comes first.
        module = Uneven(seed=rank)
        if is_first:
            optimizer = ZeroRedundancyOptimizer(module.parameters(), kind, **options)
            sharded = phalanx.DistributedDataParallel(module)
        else:
            sharded = phalanx.DistributedDataParallel(module)
            optimizer = ZeroRedundancyOptimizer(module.parameters(), kind, **options)
        assert type(optimizer) is ZeroRedundancyOptimizer
        assert optimizer.world_size == 2
        assert all_equal(train(sharded, optimizer, rank, STEPS, before_step=_clip), expected), (kind, is_first)


@pytest.mark.slow
def test_it_trains_as_the_plain_optimizer_and_ranks_of_both_hosts_begin_alike():
    on_hosts((2, 2), _trains_as_the_plain_one)


def _sends_nothing(rank, world_size, machines):
    model = nn.Linear(512, 512)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, gather_gradients=False)
    assert optimizer.gather_gradients  # between hosts all of the mean is there
    model.weight.grad, model.bias.grad = torch.ones(512, 512), torch.ones(512)
    optimizer.step()  # the state is made
    dist.barrier()
    before = machines[0].bytes_sent()
    dist.barrier()  # nobody begins before it is read
    for _ in range(5):
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    dist.barrier()
    sent = machines[0].bytes_sent() - before
    dist.barrier()
    everywhere = [torch.empty_like(model.weight) for _ in range(world_size)]
    dist.all_gather(everywhere, model.weight.detach())
    assert all(torch.equal(one, everywhere[0]) for one in everywhere)
    return norm.item(), sent


def test_a_step_and_its_clipping_send_nothing_to_another_host():
    told = on_hosts((2, 2), _sends_nothing)
    assert len({norm for norm, _ in told}) == 1
    assert told[0][1] < 50_000  # barriers, and what watches; the parameters are a million bytes


def _saves(rank, world_size, machines, folder):
    plain, sharded = wrapped(), wrapped()
    plain_optimizer = optim.AdamW(plain.parameters())
    train(plain, plain_optimizer, rank, STEPS)
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), optim.AdamW)
    train(sharded, optimizer, rank, STEPS)
    expected = plain_optimizer.state_dict()["state"]

    def equal(state):
        return state.keys() == expected.keys() and all(
            torch.equal(state[number][key], expected[number][key]) for number in expected for key in expected[number]
        )

    for to in range(world_size):
        optimizer.consolidate_state_dict(to=to)
        if rank == to:
            assert equal(optimizer.state_dict()["state"])
    with pytest.raises(ValueError, match="to=4 is not a rank of the group, which has 4"):
        optimizer.consolidate_state_dict(to=4)
    shards = [None] * world_size
    dist.all_gather_object(shards, optimizer.shard_state_dict())
    assert equal(merge_state_dicts(shards)["state"])
    assert equal(merge_state_dicts(shards[2:])["state"])

    with phalanx.CheckpointManager(folder) as manager:
        manager.save(STEPS, {"model": sharded, "optimizer": optimizer})
    again = wrapped(seed=5)
    other = ZeroRedundancyOptimizer(again.parameters(), optim.AdamW)
    with phalanx.CheckpointManager(folder) as manager:
        manager.load({"model": again, "optimizer": other})
    assert all_equal(copy_parameters(again), copy_parameters(sharded))
    expected_values = train(plain, plain_optimizer, rank, STEPS, first=STEPS)
    assert all_equal(train(again, other, rank, STEPS, first=STEPS), expected_values)


@pytest.mark.slow
def test_its_state_is_saved_and_taken_up_again_as_on_one_host(tmp_path):
    on_hosts((2, 2), _saves, str(tmp_path / "series"))


def _is_refused(rank, world_size, machines):
    model = wrapped()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    state = phalanx.elastic.State(model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"'optimizer' is a ZeroRedundancyOptimizer over ranks that share no memory"):
        commits_of(state).objects.refuse_unsupported(world_size)


def test_an_elastic_job_refuses_it():
    on_hosts((2, 2), _is_refused)


def _joins(rank, world_size, machines, offload):
    model = wrapped()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, offload=offload)
    with model.join():
        train(model, optimizer, rank, STEPS - (rank == world_size - 1))


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_a_rank_that_runs_out_of_data_is_refused_by_name(offload):
    """Ranks of a host that had left changed no parameter in later steps, those of the other host did, and all went on;
    or one rank had left, and all others waited for their whole timeout.
    """
    with pytest.raises(RankFailed) as caught:
        on_hosts((2, 2), _joins, offload)
    assert "only one rank can update each part of the parameters" in str(caught.value.errors[3])


def _offloads(rank, world_size, machines):
    plain, sharded = wrapped(), wrapped()
    expected = train(plain, optim.AdamW(plain.parameters(), fused=True), rank, STEPS)
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), optim.AdamW, offload=True)
    assert all_equal(train(sharded, optimizer, rank, STEPS), expected)


@pytest.mark.slow
def test_offloaded_it_trains_to_the_same_bits():
    on_hosts((2, 2), _offloads)


def _uses_torchs(rank, world_size, machines):
    model = wrapped()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer

    assert type(optimizer) is TorchZeroRedundancyOptimizer
    backward(model, rank, 0)
    optimizer.step()
    with pytest.raises(ValueError, match=r"offload=True needs .* hosts with equally many ranks, at least two on each"):
        ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, offload=True)


@pytest.mark.slow(but=("sizes0",))
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # what torch's module uses
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_where_a_host_has_one_rank_it_is_pytorchs_class(sizes):
    on_hosts(sizes, _uses_torchs)
