"""Offloading changes where the update happens, not one bit of what it gives."""

import copy
import gc
import random

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import all_equal
from tests.on_ranks import on_ranks
from tests.optim.late_staging import LateStaging
from tests.optim.models import Uneven, backward, batch, train, wrapped
from tests.small_models import batch_of
from tests.training import copy_parameters
from torch import nn, optim

import phalanx
from phalanx import ZeroRedundancyOptimizer, strategies
from phalanx.optim import merge_state_dicts, offload, zero
from phalanx.optim.plan import plan_waves
from phalanx.optim.staging import HostStaging, plan_pages
from phalanx.testing import run_ranks

STEPS = 3
CASES = [
    (optim.AdamW, {"fused": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.01, "foreach": True}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Adafactor, {}),  # gets whole parameters
]


def _late(monkeypatch, wave_bytes=1000):
    """Copies as late as they may be, and many waves. In a rank: the patch goes with its process."""
    monkeypatch.setattr(zero, "HostStaging", LateStaging)
    monkeypatch.setattr(offload, "WAVE_BYTES", wave_bytes)


def _offloaded(make_model=wrapped):
    model = make_model()
    model.register_forward_pre_hook(LateStaging.compute)
    return model


def _settled(module):
    LateStaging.compute(module)
    return copy_parameters(module)


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_weights_are_bitwise_those_without_offload_however_late_copies_come(rank, world_size, monkeypatch):
    _late(monkeypatch)
    different = []
    for made, options in CASES:
        plain, kept, away = wrapped(), wrapped(), _offloaded()
        expected = train(plain, made(plain.parameters(), **options), rank, STEPS)
        sharded = train(kept, ZeroRedundancyOptimizer(kept.parameters(), made, **options), rank, STEPS)
        optimizer = ZeroRedundancyOptimizer(away.parameters(), made, offload=True, **options)
        train(away, optimizer, rank, STEPS)
        if not (all_equal(_settled(away), expected) and all_equal(sharded, expected)):
            different.append((made.__name__, options))
    assert different == []


@on_ranks(2)
def test_weights_are_those_of_one_process_with_the_whole_batch_of_gradients(rank):
    away = wrapped()
    optimizer = ZeroRedundancyOptimizer(away.parameters(), optim.AdamW, offload=True)  # fused, as nobody says else
    alone = Uneven()
    reference = optim.AdamW(alone.parameters(), fused=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(away, rank, step)
        for mine, theirs in zip(alone.parameters(), away.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.clone()
        optimizer.step()
        reference.step()
    assert all_equal(copy_parameters(away), copy_parameters(alone))
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.optim.param_groups[0]["fused"]


def _half_parameters():
    torch.manual_seed(0)
    made = [torch.randn(37, 5).to(torch.bfloat16), torch.randn(700).half(), torch.randn(41), torch.randn(9).double()]
    made += [torch.randn(33, dtype=torch.complex64), torch.randn(7, 9).t().to(torch.bfloat16)]
    return [nn.Parameter(one) for one in made]


def _give_gradients(parameters, step):
    torch.manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64).to(parameter.dtype)


@on_ranks(3)
def test_half_parameters_are_updated_in_float32_and_all_others_as_they_are(monkeypatch):
    _late(monkeypatch)
    parameters = _half_parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, optim.Adam, offload=True, lr=0.01)
    full = [p.detach().float() if p.dtype.itemsize == 2 else p.detach().clone() for p in parameters]
    reference = optim.Adam([nn.Parameter(one) for one in full], lr=0.01)
    references = reference.param_groups[0]["params"]
    for step in range(20):
        _give_gradients(parameters, step)
        for mine, theirs in zip(references, parameters, strict=True):
            mine.grad = theirs.grad.to(mine.dtype)
        optimizer.step()
        reference.step()
    LateStaging.compute(None)
    rounded = [mine.detach().to(theirs.dtype) for mine, theirs in zip(references, parameters, strict=True)]
    assert all_equal(rounded, [p.detach() for p in parameters])


@on_ranks(2)
def test_what_happens_to_gradients_after_backward_counts(rank, monkeypatch):
    """Copies have been made by then, and must not be what is updated with."""
    _late(monkeypatch)
    results = []
    for away in (False, True):
        ddp = _offloaded()
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW, offload=away, fused=True)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step == 1:  # accumulated
                with ddp.no_sync():
                    backward(ddp, rank, 50)
            backward(ddp, rank, step)
            if step == 2:
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
            if step == 3:
                ddp.module.scale.grad = ddp.module.scale.grad * 2
                ddp.module.head.weight.grad = None
            if step == 4:
                norm = optimizer.clip_grad_norm_(0.01)
                optimizer.clip_grad_norm_(0.005)
                ddp.module.head.weight.grad.mul_(3.0)
            if step == 5:
                backward(ddp, rank, 60)  # a second round adds to the mean of the first
            optimizer.step()
        results.append((_settled(ddp), norm, [p.grad for p in ddp.parameters() if p.grad is not None]))
    assert [
        all_equal(results[0][0], results[1][0]),
        torch.equal(results[0][1], results[1][1]),
        all_equal(results[0][2], results[1][2]),
    ] == [True] * 3


@on_ranks(2)
def test_what_is_written_into_parameters_between_steps_counts(rank):
    results = []
    for away in (False, True):
        ddp = wrapped()
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, offload=away, lr=0.1, momentum=0.9)
        if not away:
            optimizer.param_groups[0]["fused"] = True
        train(ddp, optimizer, rank, 2)
        dist.barrier()
        if away or rank == 0:
            with torch.no_grad():
                ddp.module.head.weight.clamp_(-0.05, 0.05)
        if away:
            ddp.module.hidden.load_state_dict(copy.deepcopy(results[0][1]))
        else:
            loaded = copy.deepcopy(Uneven(5).hidden.state_dict())
            results.append((None, loaded))
            ddp.module.hidden.load_state_dict(loaded)
        dist.barrier()
        train(ddp, optimizer, rank, 2, first=2)
        results.append((copy_parameters(ddp), None))
    assert all_equal(results[1][0], results[2][0])


class _Checksummed(HostStaging):
    """Writes to tensors of the CPU are noticed as those to a device's are."""

    def __init__(self, device):
        super().__init__(device)
        self.takes_checksums = True


@on_ranks(2)
def test_gradients_changed_by_what_pytorch_does_not_count_are_what_the_update_takes(rank, world_size, monkeypatch):
    """A copy used to count while the gradient's version was the same, which neither collectives nor the unscaling of a
    GradScaler raise: with a GradScaler, models were trained on gradients as they were scaled, and a gradient that
    the user reduced himself on one that was not."""
    alone = [dist.new_group([one]) for one in range(world_size)][rank]
    results = []
    for away, staging in ((False, HostStaging), (True, HostStaging), (True, _Checksummed)):
        monkeypatch.setattr(zero, "HostStaging", staging)
        ddp, bare = wrapped(), Uneven()
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, offload=away, lr=0.1)
        # A group of its own, in a job where others may reduce what autograd has written here.
        other = ZeroRedundancyOptimizer(bare.parameters(), optim.SGD, offload=away, lr=0.1, process_group=alone)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(ddp(batch(rank, step)).square().mean()).backward()
            scaler.unscale_(optimizer)
            gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
            for gradient in gradients:
                if step == 1:
                    dist.all_reduce(gradient)
                if step == 2:
                    gradient.data.neg_()
                if step == 3:
                    gradient.data.copy_(gradient.flatten().flip(0).view_as(gradient))
            if step == 3:
                optimizer.clip_grad_norm_(0.01)
            scaler.step(optimizer)
            scaler.update()
            other.zero_grad()
            backward(bare, rank, step)
            for parameter in bare.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            other.step()
        results.append((copy_parameters(ddp), copy_parameters(bare)))
    assert [all_equal(result[n], results[0][n]) for result in results[1:] for n in range(2)] == [True] * 4


@pytest.mark.slow
@on_ranks(2)
def test_parameters_changed_by_what_pytorch_does_not_count_stay_changed(rank, monkeypatch):
    """What a broadcast, a DDP that was built after the optimizer, or a write through .data left in a parameter was put
    back by the next step, since the parameter's version was still the one of the last copy to it."""
    lost = []
    for staging in (HostStaging, _Checksummed):
        monkeypatch.setattr(zero, "HostStaging", staging)
        for dtype in (torch.float32, torch.bfloat16):
            module = nn.Linear(60, 41).to(dtype)
            optimizer = ZeroRedundancyOptimizer(module.parameters(), optim.SGD, offload=True, lr=0.1)

            def broadcast(module=module):
                if rank == 0:
                    nn.init.normal_(module.weight)
                with torch.no_grad():
                    dist.broadcast(module.weight, 0)

            def average(module=module):
                for parameter in module.parameters():
                    dist.all_reduce(parameter.data)

            def build_ddp(module=module):
                if rank == 0:
                    nn.init.normal_(module.weight)
                phalanx.DistributedDataParallel(module)

            def through_data(module=module):
                module.weight.data.neg_()
                module.bias.data = torch.full_like(module.bias, 3.0)

            for change in (broadcast, average, build_ddp, through_data):
                for _ in range(2):
                    change()
                    expected = copy_parameters(module)
                    for parameter in module.parameters():
                        parameter.grad = torch.zeros_like(parameter)
                    optimizer.step()
                    if not all_equal(copy_parameters(module), expected):
                        lost.append((staging.__name__, dtype, change.__name__))
    assert lost == []


@on_ranks(2)
def test_groups_frozen_parameters_and_those_without_gradients(rank, monkeypatch):
    _late(monkeypatch)
    results = []
    for away in (False, True):
        ddp = _offloaded(lambda: phalanx.DistributedDataParallel(Uneven(), find_unused_parameters=True))
        model = ddp.module
        optimizer = ZeroRedundancyOptimizer(
            [
                {"params": [*model.conv.parameters(), model.frozen], "nesterov": True},
                {"params": model.hidden.parameters(), "lr": 0.01, "momentum": 0.0},
            ],
            optim.SGD,
            offload=away,
            lr=0.1,
            momentum=0.9,
            fused=True,
        )
        train(ddp, optimizer, rank, 2)
        optimizer.add_param_group({"params": [model.scale, *model.head.parameters()], "momentum": 0.5})
        train(ddp, optimizer, rank, 2, first=2)
        model.frozen.requires_grad_()  # nobody averages it: the same gradient on all ranks
        for _ in range(2):
            optimizer.zero_grad()
            model.frozen.grad = torch.full_like(model.frozen, 0.25)
            optimizer.step()
        results.append(_settled(ddp))
    assert all_equal(*results)


@pytest.mark.slow(but=("2-0",))
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_parameters_that_get_their_first_gradients_at_different_steps(world_size, seed):
    """torch's fused SGD raises a TypeError for a tensor without momentum among tensors that have some."""
    draw = random.Random(seed)
    steps = [[draw.random() < 0.5 for _ in range(5)] for _ in range(6)]
    options = {"momentum": 0.9, "dampening": draw.choice([0.0, 0.1]), "weight_decay": draw.choice([0.0, 0.01])}
    results = []
    for make in (
        lambda tensors: optim.SGD(tensors, lr=0.1, **options),
        lambda tensors: ZeroRedundancyOptimizer(tensors, optim.SGD, lr=0.1, offload=True, **options),
    ):
        tensors = [torch.full((3 + number,), 1.0, requires_grad=True) for number in range(5)]
        optimizer = make(tensors)
        for number, step in enumerate(steps):
            for index, (tensor, has_gradient) in enumerate(zip(tensors, step, strict=True)):
                tensor.grad = torch.full_like(tensor, number - index * 0.3) if has_gradient else None
            optimizer.step()
        results.append([tensor.detach().clone() for tensor in tensors])
    torch.testing.assert_close(*results)


@on_ranks(2)
def test_a_closure_a_scheduler_and_pytorchs_ddp(rank, monkeypatch):
    _late(monkeypatch)
    results = []
    for away in (False, True):
        model = Uneven()
        model.frozen.requires_grad_(False)
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=away)
        ddp.register_forward_pre_hook(LateStaging.compute)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW, offload=away, fused=True)
        scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        losses = []
        for step in range(4):

            def closure(step=step, ddp=ddp, optimizer=optimizer):
                optimizer.zero_grad()
                loss = ddp(batch(rank, step)).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
            scheduler.step()
        results.append((_settled(ddp), losses))
    assert all_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@on_ranks(2)
def test_state_is_that_of_the_plain_optimizer_and_loads_everywhere(rank, world_size):
    plain, away = wrapped(), wrapped()
    reference = optim.AdamW(plain.parameters(), fused=True)
    optimizer = ZeroRedundancyOptimizer(away.parameters(), optim.AdamW, offload=True)
    train(plain, reference, rank, 2)
    train(away, optimizer, rank, 2)
    optimizer.consolidate_state_dict(to=0)
    wholes = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(wholes)
    (whole,) = wholes
    expected = reference.state_dict()
    assert whole["param_groups"] == [{**expected["param_groups"][0], "fused": None}]
    assert whole["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert all(torch.equal(value, whole["state"][number][key]) for key, value in state.items())
        assert state.keys() == whole["state"][number].keys()
    shards = [None] * world_size
    dist.all_gather_object(shards, optimizer.shard_state_dict())
    assert merge_state_dicts(shards)["state"].keys() == whole["state"].keys()
    results = []
    for make in (
        lambda params: optim.AdamW(params, fused=True),
        lambda params: ZeroRedundancyOptimizer(params, optim.AdamW, fused=True),
        lambda params: ZeroRedundancyOptimizer(params, optim.AdamW, offload=True),
    ):
        model = wrapped()
        again = make(model.parameters())
        again.load_state_dict(copy.deepcopy(whole))
        for group in again.param_groups:
            group["fused"] = True
        model.module.load_state_dict(away.module.state_dict())
        dist.barrier()
        results.append(train(model, again, rank, 2, first=2))
    assert (
        [all_equal(result, train(plain, reference, rank, 2, first=2)) for result in results[:1]]
        + [all_equal(result, results[0]) for result in results]
    ) == [True] * 4


@pytest.mark.slow(but=("True",))
@pytest.mark.parametrize("model_first", [True, False])
@on_ranks(2)
def test_masters_of_half_parameters_are_saved_and_come_back_to_the_bit(rank, world_size, model_first):
    """The masters of a transposed parameter that is whole on one rank came back to other elements."""

    def values_of(parameters):
        return [p.detach().clone() for p in parameters]

    parameters = _half_parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, optim.Adam, offload=True, lr=1e-3)
    for step in range(5):
        _give_gradients(parameters, step)
        optimizer.step()
    optimizer.consolidate_state_dict(to=rank if world_size == 1 else 0)
    wholes = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(wholes)
    weights = values_of(parameters)
    again = [nn.Parameter(torch.zeros_like(p)) for p in parameters]
    other = ZeroRedundancyOptimizer(again, optim.Adam, offload=True, lr=1e-3)

    def load_model():
        with torch.no_grad():
            for mine, saved in zip(again, weights, strict=True):
                mine.copy_(saved)

    if model_first:
        load_model()
    other.load_state_dict(wholes[0])
    if not model_first:
        load_model()
    for step in range(5, 15):
        for each, by in ((parameters, optimizer), (again, other)):
            _give_gradients(each, step)
            by.step()
    masters = [one.optim.param_groups[0]["params"] for one in (optimizer, other)]
    plain = _half_parameters()
    optim.Adam(plain).load_state_dict(wholes[0])  # casts, as always, and steps:
    _give_gradients(plain, 0)
    optim.Adam(plain).step()
    assert all_equal(values_of(parameters), values_of(again))
    assert all_equal(*masters)


def test_a_checkpoint_in_shards_holds_the_masters_for_any_number_of_ranks(tmp_path):
    def build(seed):
        model = nn.ParameterList(p for p in _half_parameters() if p.is_floating_point())
        for parameter in model:
            parameter.data.mul_(seed)
        return model, ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, offload=True, lr=1e-3)

    def go_on(model, optimizer, first):
        for step in range(first, first + 5):
            _give_gradients(list(model), step)
            optimizer.step()
        return [p.detach().clone() for p in model]

    def save(rank, world_size):
        model, optimizer = build(1)
        go_on(model, optimizer, 0)
        phalanx.CheckpointManager(tmp_path, sharded=True).save(1, {"model": model, "optimizer": optimizer})
        return go_on(model, optimizer, 5)

    def load(rank, world_size):
        model, optimizer = build(2)
        phalanx.CheckpointManager(tmp_path).load({"model": model, "optimizer": optimizer})
        return go_on(model, optimizer, 5)

    expected = run_ranks(save, 2)[0]
    for world_size in (1, 3):
        assert all(all_equal(weights, expected) for weights in run_ranks(load, world_size))


@pytest.mark.slow
@on_ranks(4)
def test_each_host_may_update_all_parameters_with_its_own_group(rank):
    """Two groups of two stand for two hosts; the gradients are the mean of all four."""
    hosts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plain, away = wrapped(), wrapped()
    optimizer = ZeroRedundancyOptimizer(away.parameters(), optim.AdamW, process_group=hosts[rank // 2], offload=True)
    expected = train(plain, optim.AdamW(plain.parameters(), fused=True), rank, STEPS)
    assert all_equal(train(away, optimizer, rank, STEPS), expected)


def test_the_state_lies_in_the_memory_of_the_host_and_parameters_do_not():
    def placed(rank, world_size):
        ddp = wrapped()
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW, offload=True)
        train(ddp, optimizer, rank, 2)
        contains = dist.group.WORLD.symm_mem.contains
        state = [v for s in optimizer.optim.state.values() for key, v in s.items() if key != "step"]
        masters = optimizer.optim.param_groups[0]["params"]
        mine = sum(value.numel() for value in state)
        return (
            all(contains(value.data_ptr()) for value in (*state, *masters) if value.dim()),
            any(contains(p.data_ptr()) for p in ddp.parameters()),
            mine,
            sum(p.numel() for p in ddp.parameters() if p.requires_grad),
        )

    results = run_ranks(placed, 3)
    assert [result[:2] for result in results] == [(True, False)] * 3
    assert sum(result[2] for result in results) == 2 * results[0][3]


@on_ranks(2)
def test_gather_gradients_false_and_strategies_take_it_too(rank):
    results = []
    for away in (False, True):
        strategy = strategies.ShardedStrategy(gather_gradients=False, offload=away, launch=False)
        torch.manual_seed(0)
        model = nn.Linear(600, 300)
        ddp, optimizer = strategy.setup(model, lambda params: optim.SGD(params, lr=0.1, momentum=0.9, fused=True))
        assert isinstance(optimizer, ZeroRedundancyOptimizer)
        assert optimizer.offload is away
        for step in range(3):
            optimizer.zero_grad()
            ddp(batch_of(rank, step, shape=(4, 600))).square().mean().backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
        results.append(copy_parameters(ddp))
    assert all_equal(*results)


def _refuses_parameters_in_the_same_memory():
    """Each had a master, of which the last to be copied back won: the other's update was lost."""
    one = nn.Parameter(torch.ones(10))
    for offloads in (False, True):
        again = nn.Parameter(one.data)
        for params in ([one, again], iter([{"params": iter([("one", one)])}, {"params": [("tail", again)]}])):
            with pytest.raises(ValueError, match=r"two parameters, of shapes \(10,\) and \(10,\), share memory"):
                ZeroRedundancyOptimizer(params, optim.SGD, offload=offloads)
        optimizer = ZeroRedundancyOptimizer([one], optim.SGD, offload=offloads)
        with pytest.raises(ValueError, match="share memory on rank 0"):
            optimizer.add_param_group({"params": [nn.Parameter(one.data[5:])]})
        flat = torch.ones(10)  # side by side is not the same
        optimizer.add_param_group({"params": [nn.Parameter(flat[:5]), nn.Parameter(flat[5:])]})
        optimizer.step()


@on_ranks(2)
def test_frozen_integers_may_be_among_the_parameters_on_any_rank():
    """The rank that was given them failed in construction, "only Tensors of floating point dtype can require
    gradients", and the others waited for it."""
    for offloads in (False, True):
        codes = nn.Parameter(torch.arange(70000, dtype=torch.int32), requires_grad=False)  # cut
        few = nn.Parameter(torch.ones(5, dtype=torch.uint8), requires_grad=False)
        weight = nn.Parameter(torch.ones(300))
        optimizer = ZeroRedundancyOptimizer([codes, few, weight], optim.AdamW, offload=offloads, lr=0.1)
        weight.grad = torch.ones(300)
        optimizer.step()
        assert weight.lt(1).all()
        assert torch.equal(codes, torch.arange(70000, dtype=torch.int32))


def test_what_it_does_not_do_is_refused_with_the_reason():
    def refused(rank, world_size):
        parameters = [nn.Parameter(torch.randn(4, 6).t()[::2])]
        with pytest.raises(ValueError, match=r"parameter 0 is torch.strided on cpu with strides \(2, 6\), but offload"):
            ZeroRedundancyOptimizer(parameters, optim.SGD, offload=True)
        embedding = nn.Embedding(5, 3, sparse=True)
        optimizer = ZeroRedundancyOptimizer(embedding.parameters(), optim.SGD, offload=True)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match="sparse gradient, which offload=True does not copy"):
            optimizer.step()
        linear = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(linear.parameters(), optim.SGD, offload=True)
        linear.double()
        with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 .* was moved to another device or dtype"):
            optimizer.step()
        _refuses_parameters_in_the_same_memory()

    run_ranks(refused, 1)

    def over_gloo(rank, world_size):
        with pytest.raises(ValueError, match="offload=True needs a process group of backend 'phalanx'"):
            ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), optim.SGD, offload=True)
        dist.barrier()

    run_ranks(over_gloo, 1, backend="gloo")


@on_ranks(2)
def test_a_model_that_goes_from_float16_to_bfloat16_is_refused(rank):
    """Its values went through float16: above 65,504 they became inf."""
    model = nn.Linear(3, 2).half()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, offload=True)
    model.bfloat16()
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match="was moved to another device or dtype"):
        optimizer.step()


def test_waves_hold_as_much_as_they_may_and_every_gradient_is_in_one():
    assert plan_waves([], 10) == [range(0)]
    assert plan_waves([3, 3, 3, 3], 6) == [range(2), range(2, 4)]
    assert plan_waves([30, 1, 1, 30], 6) == [range(1), range(1, 3), range(3, 4)]


class _Pages:
    """Refuses as CUDA does: a page is registered once, and its range given back as it was registered."""

    def __init__(self):
        self.registered = {}
        self.num_refused = 0

    def cudaHostRegister(self, start, nbytes, _flags):  # CUDA's name
        taken = any(start < at + length and at < start + nbytes for at, length in self.registered.items())
        self.num_refused += taken
        if not taken:
            self.registered[start] = nbytes
        return 712 if taken else 0

    def cudaHostUnregister(self, start):  # CUDA's name
        del self.registered[start]


@on_ranks(2)
def test_no_two_locked_pieces_of_memory_share_a_page(monkeypatch):
    """The copies of small gradients lay side by side, in pages of which CUDA registers each once; what it had refused
    it told the next kernel."""

    class Locking(HostStaging):
        locks = True

    pages = _Pages()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pages)
    monkeypatch.setattr(zero, "HostStaging", Locking)
    parameters = _half_parameters() + [nn.Parameter(torch.randn(30)) for _ in range(20)]
    groups = [{"params": parameters[:9]}, {"params": parameters[9:]}]
    optimizer = ZeroRedundancyOptimizer(groups, optim.SGD, offload=True)
    _give_gradients(parameters, 0)
    optimizer.step()
    num_locked = len(pages.registered)
    del optimizer, groups
    gc.collect()
    assert (pages.num_refused, num_locked >= 4, pages.registered) == (0, True, {})  # masters, and copies of each dtype


def test_a_page_is_locked_once_whatever_lies_in_it():
    assert plan_pages(4096, []) == []
    assert plan_pages(4096 + 100, [(0, 10), (10, 10), (20, 30)]) == [(4096, 8192)]
    assert plan_pages(8192, [(4096, 8193), (0, 1), (20000, 20001)]) == [(8192, 20480), (24576, 28672)]
