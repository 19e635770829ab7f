"""State in shards and whole: into another number of ranks, and into the plain optimizer."""

import pytest
import torch
from tests.comparisons import all_equal
from tests.on_ranks import on_ranks
from tests.optim.models import Uneven, batch, train, wrapped
from tests.training import copy_parameters
from torch import nn, optim

from phalanx import ZeroRedundancyOptimizer
from phalanx.optim import merge_state_dicts
from phalanx.testing import run_ranks

CLASSES = [(optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.AdamW, {"fused": True}), (optim.Adafactor, {})]


def _same_state(one, other):
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number in one["state"]:
        assert one["state"][number].keys() == other["state"][number].keys()
        for key, value in one["state"][number].items():
            theirs = other["state"][number][key]
            assert torch.equal(value, theirs) if isinstance(value, torch.Tensor) else value == theirs
            assert not isinstance(value, torch.Tensor) or value.stride() == theirs.stride()


def _one_batch(ddp, optimizer, step):
    """All ranks see the same batch, so that the number of ranks makes no difference."""
    optimizer.zero_grad()
    ddp(batch(0, step)).square().mean().backward()
    optimizer.step()


@pytest.mark.slow(but=("2-AdamW-options1",))
@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES)
@pytest.mark.parametrize("to", [0, 2])
@on_ranks(3)
def test_the_consolidated_state_is_the_plain_optimizers(rank, optimizer_class, options, to):
    plain, sharded = wrapped(), wrapped()
    reference = optimizer_class(plain.parameters(), **options)
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), optimizer_class, **options)
    train(plain, reference, rank, 3)
    train(sharded, optimizer, rank, 3)
    optimizer.consolidate_state_dict(to)
    if rank == to:
        _same_state(optimizer.state_dict(), reference.state_dict())


@pytest.mark.slow(but=("Adafactor-options1",))
@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES[1:])
def test_training_goes_on_bitwise_in_another_number_of_ranks_and_in_the_plain_optimizer(
    optimizer_class, options, tmp_path
):
    def sharded(params):
        return ZeroRedundancyOptimizer(params, optimizer_class, **options)

    def plain(params):
        return optimizer_class(params, **options)

    def begin(rank, world_size):
        ddp = wrapped()
        optimizer = sharded(ddp.parameters())
        for step in range(2):
            _one_batch(ddp, optimizer, step)
        torch.save(optimizer.shard_state_dict(), tmp_path / f"shard{rank}.pt")
        optimizer.consolidate_state_dict()
        if rank == 0:
            torch.save({"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "whole.pt")

    def go_on(rank, world_size, make, state):
        saved = torch.load(tmp_path / "whole.pt")
        ddp = wrapped(seed=7)
        ddp.load_state_dict(saved["model"])
        optimizer = make(ddp.parameters())
        optimizer.load_state_dict(saved["optimizer"] if state is None else state)
        for step in range(2, 4):
            _one_batch(ddp, optimizer, step)
        return copy_parameters(ddp)

    run_ranks(begin, 4)
    merged = merge_state_dicts([torch.load(tmp_path / f"shard{rank}.pt") for rank in (3, 1, 0, 2)])
    _same_state(merged, torch.load(tmp_path / "whole.pt")["optimizer"])
    (expected,) = run_ranks(go_on, 1, plain, None)
    for world_size, make, state in [(1, sharded, None), (2, sharded, merged), (2, plain, merged)]:
        for got in run_ranks(go_on, world_size, make, state):
            assert all_equal(got, expected)


@on_ranks(3)
def test_a_plain_optimizers_state_loads_into_shards(rank):
    plain, sharded = wrapped(), wrapped()
    reference = optim.Adam(plain.parameters(), lr=0.01)
    train(plain, reference, rank, 2)
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), optim.Adam)
    sharded.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    expected = train(plain, reference, rank, 2, first=2)
    assert all_equal(train(sharded, optimizer, rank, 2, first=2), expected)
    assert (optimizer.param_groups[0]["lr"], reference.state_dict()["state"][0]["step"].item()) == (0.01, 4.0)


@on_ranks(2)
def test_a_state_of_other_groups_is_refused():
    optimizer = ZeroRedundancyOptimizer(Uneven().parameters(), optim.Adam)
    with pytest.raises(ValueError, match="loaded state dict contains a parameter group that doesn't match"):
        optimizer.load_state_dict(optim.Adam([nn.Parameter(torch.zeros(3))]).state_dict())


@on_ranks(2)
def test_state_dict_says_which_call_is_missing_and_is_not_given_stale(rank):
    ddp = wrapped()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.Adam)
    train(ddp, optimizer, rank, 1)
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        assert optimizer.state_dict()["state"]
    else:
        with pytest.raises(RuntimeError, match=r"First call consolidate_state_dict\(to=0\) on all ranks"):
            optimizer.state_dict()
    train(ddp, optimizer, rank, 1, first=1)
    with pytest.raises(RuntimeError, match=r"each rank has only the state of its slices"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="to=2 is not a rank of the group, which has 2"):
        optimizer.consolidate_state_dict(to=2)


def _shards():
    def shard(rank, world_size):
        ddp = wrapped()
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.Adam)
        train(ddp, optimizer, rank, 1)
        return optimizer.shard_state_dict()

    return run_ranks(shard, 2)


def test_shards_that_do_not_make_a_whole_are_refused():
    shards = _shards()
    with pytest.raises(ValueError, match="needs the shard of every rank, got none"):
        merge_state_dicts([])
    with pytest.raises(
        ValueError, match=r"parameter 4 has 10332 elements, but the shards have state for 0 to \d+. Pass each"
    ):
        merge_state_dicts(shards[:1])
    with pytest.raises(ValueError, match="of different models"):
        merge_state_dicts([shards[0], {**shards[1], "layout": {}}])


def test_what_outlives_a_lost_rank_has_the_strides_of_the_parameters():
    """Moments of a parameter that was whole on one rank were contiguous, and fused optimizers look at no strides."""

    def kept(rank, world_size):
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Conv2d(4, 4, 3) for _ in range(3)]).to(memory_format=torch.channels_last)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, fused=True)
        optimizer.back_up_state()
        torch.manual_seed(2)
        model(torch.randn(2, 4, 8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(to=rank if world_size == 1 else 0)
        if rank == 0:
            whole = optimizer.state_dict()
            _same_state({**whole, "state": optimizer.read_state_backup()}, whole)
            return [state["exp_avg"].stride() for state in optimizer.read_state_backup().values()][::2]
        return None

    assert run_ranks(kept, 2)[0] == [(36, 1, 12, 4)] * 3
