"""The sharded optimizer's weights are bit for bit those of the plain one, and exist once."""

import contextlib
import copy
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import all_equal
from tests.on_ranks import on_ranks
from tests.optim.models import Uneven, backward, batch, train, wrapped
from tests.training import copy_parameters
from torch import nn, optim

import phalanx
from phalanx import DistributedDataParallel, ZeroRedundancyOptimizer
from phalanx.testing import RankFailed, run_ranks

STEPS = 4

USUAL = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),  # cut off a line's boundary, it rounds differently
    (optim.Adam, {}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"fused": False}),
    (optim.AdamW, {"foreach": True}),
]
EVERY_CLASS = [
    *USUAL,
    (optim.SGD, {"lr": 0.1}),
    (optim.Adam, {"amsgrad": True, "maximize": True, "lr": torch.tensor(0.001)}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"fused": True}),
    (optim.Adadelta, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
    (optim.ASGD, {}),
    (optim.Adafactor, {}),
]


class NormSGD(optim.SGD):
    """Not element-wise: each parameter's step has the length lr."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad / p.grad.norm().clamp_min(1e-8), alpha=group["lr"])


def _compare(make_plain, make_sharded, rank, **training):
    plain, sharded = wrapped(), wrapped()
    expected = train(plain, make_plain(plain.parameters()), rank, STEPS, **training)
    got = train(sharded, make_sharded(sharded.parameters()), rank, STEPS, **training)
    return all_equal(got, expected) and not all_equal(got, copy_parameters(Uneven()))


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_weights_are_bitwise_those_of_ddp_with_the_plain_optimizer(rank, world_size):
    chosen = EVERY_CLASS if world_size == 3 else USUAL
    assert [
        (made.__name__, options)
        for made, options in chosen
        if not _compare(
            lambda params, made=made, options=options: made(params, **options),
            lambda params, made=made, options=options: ZeroRedundancyOptimizer(params, made, **options),
            rank,
        )
    ] == []


@on_ranks(3)
def test_half_double_and_complex_parameters_are_updated_like_the_plain_optimizers():
    def parameters():
        torch.manual_seed(0)
        return [
            nn.Parameter(torch.randn(333).to(dtype))
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64)
        ]

    plain, sharded = parameters(), parameters()
    optimizers = [optim.Adam(plain), ZeroRedundancyOptimizer(sharded, optim.Adam)]
    for step in range(STEPS):
        torch.manual_seed(step)
        for one, other in zip(plain, sharded, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all_equal(sharded, plain)


@on_ranks(3)
def test_whole_parameters_are_given_to_a_class_that_is_not_known(rank):
    def sharded(params):
        return ZeroRedundancyOptimizer(params, NormSGD, lr=0.1)

    assert _compare(lambda params: NormSGD(params, lr=0.1), sharded, rank)


@on_ranks(3)
def test_gradient_clipping_by_global_norm_needs_nothing_special(rank):
    norms = []

    def clip(ddp):
        norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.05))

    done = _compare(
        lambda params: optim.AdamW(params, fused=True),
        lambda params: ZeroRedundancyOptimizer(params, optim.AdamW, fused=True),
        rank,
        before_step=clip,
    )
    assert done
    assert bool(torch.stack(norms).gt(0.05).any())


@on_ranks(3)
def test_groups_have_their_own_options_and_can_be_added(rank):
    results = []
    for make in (
        lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9),
        lambda groups: ZeroRedundancyOptimizer(groups, optim.SGD, lr=0.1, momentum=0.9),
    ):
        ddp = wrapped()
        model = ddp.module
        optimizer = make(
            [{"params": model.conv.parameters()}, {"params": model.hidden.parameters(), "lr": 0.01, "nesterov": True}]
        )
        train(ddp, optimizer, rank, 2)
        optimizer.add_param_group({"params": [model.scale, *model.head.parameters()], "momentum": 0.0})
        results.append((train(ddp, optimizer, rank, 2, first=2), [g["momentum"] for g in optimizer.param_groups]))
    assert all_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == [0.9, 0.9, 0.0]


@on_ranks(2)
def test_schedulers_change_the_rate_of_every_ranks_slices(rank):
    results = []
    for make in (
        lambda params: optim.AdamW(params, lr=0.1),
        lambda params: ZeroRedundancyOptimizer(params, optim.AdamW, lr=0.1),
    ):
        ddp = wrapped()
        optimizer = make(ddp.parameters())
        scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)  # changes lr and betas
        for step in range(5):
            train(ddp, optimizer, rank, 1, first=step)
            scheduler.step()
        results.append((copy_parameters(ddp), scheduler.get_last_lr(), optimizer.param_groups[0]["betas"]))
    assert all_equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@on_ranks(2)
def test_a_closure_is_called_once_and_its_loss_returned():
    model = Uneven()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    before = copy_parameters(model)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, 8, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    loss = optimizer.step(closure)
    assert losses == [loss.item()]
    assert not all_equal(before, copy_parameters(model))


@on_ranks(2)
def test_zero_grad_frees_the_gradients():
    model = Uneven()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    model(torch.ones(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    pieces = [p for group in optimizer.optim.param_groups for p in group["params"]]
    assert all(p.grad is None for p in [*model.parameters(), *pieces])


@on_ranks(2)
def test_parameters_without_a_gradient_stay_as_they_are():
    model = Uneven()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, weight_decay=0.1)
    before = model.hidden.weight.detach().clone(), model.head.bias.detach().clone()
    model.head.bias.grad = torch.ones_like(model.head.bias)
    optimizer.step()
    assert torch.equal(model.hidden.weight, before[0])
    assert not torch.equal(model.head.bias, before[1])


@on_ranks(3)
def test_what_one_rank_writes_into_a_parameter_all_ranks_see(rank):
    model = Uneven(seed=rank)  # rank 0's values become everybody's
    ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    as_rank_0 = all_equal(copy_parameters(model), copy_parameters(Uneven(seed=0)))
    dist.barrier()
    with torch.no_grad():
        if rank == 1:
            model.hidden.weight[3, 5] = 42.0
    dist.barrier()
    assert as_rank_0
    assert model.hidden.weight[3, 5].item() == 42.0
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_each_rank_keeps_the_state_of_its_own_slices_only():
    def sizes(rank, world_size):
        ddp = wrapped()
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.Adam)
        train(ddp, optimizer, rank, 1)
        return sum(t.numel() for s in optimizer.optim.state.values() for k, t in s.items() if k == "exp_avg")

    held = run_ranks(sizes, 4)
    trained = sum(p.numel() for p in Uneven().parameters() if p.requires_grad)
    assert sum(held) == trained
    assert max(held) - min(held) <= 4 * 32  # the ends of four parameters share a line with nothing


@on_ranks(2)
def test_parameters_outlive_the_optimizer_and_the_group(rank):
    ddp = wrapped()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1)
    expected = train(ddp, optimizer, rank, 1)
    model = ddp.module
    del ddp, optimizer
    dist.destroy_process_group()
    assert all_equal(copy_parameters(model), expected)
    assert all_equal(copy_parameters(copy.deepcopy(model)), expected)


def test_saving_one_parameter_does_not_save_them_all(tmp_path):
    def saved(rank, world_size):
        model = Uneven()
        ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
        torch.save(model.head.bias, tmp_path / f"{rank}.pt")
        return os.path.getsize(tmp_path / f"{rank}.pt")

    assert max(run_ranks(saved, 2)) < 4000


@on_ranks(4)
def test_a_subgroup_shares_among_its_own_ranks(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    model = Uneven(seed=rank)
    ddp = phalanx.DistributedDataParallel(model, process_group=group)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, process_group=group, lr=0.1)
    plain = phalanx.DistributedDataParallel(Uneven(seed=rank), process_group=group)
    expected = train(plain, optim.SGD(plain.parameters(), lr=0.1), rank, 2)
    assert all_equal(train(ddp, optimizer, rank, 2), expected)


@on_ranks(2, backend="gloo")
def test_on_gloo_it_is_pytorchs_own(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about its own
        made = []

        def make(params):
            made.append(ZeroRedundancyOptimizer(params, optim.AdamW, parameters_as_bucket_view=True, fused=True))
            return made[0]

        # The plain optimizer is no anchor: in PyTorch's bucket view a convolution's weights lose channels_last, and
        # whether the results are the same then depends on the processor.
        from torch.distributed.optim import ZeroRedundancyOptimizer as own

        options = {"parameters_as_bucket_view": True, "fused": True}
        done = _compare(lambda params: own(params, optim.AdamW, **options), make, rank)
    assert (done, type(made[0]) is own) == (True, True)


@pytest.mark.parametrize("way", ["PyTorch's DDP", "wrapped afterwards", "named parameters", "gradients apart"])
@on_ranks(2)
def test_it_does_not_matter_how_it_is_put_together(rank, way):
    model = Uneven(seed=rank if way == "wrapped afterwards" else 0)
    if way == "PyTorch's DDP":
        ddp, plain = (nn.parallel.DistributedDataParallel(one) for one in (model, Uneven()))
    else:
        plain = wrapped()
    if way == "wrapped afterwards":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
        ddp = phalanx.DistributedDataParallel(model)
    elif way == "gradients apart":
        ddp = phalanx.DistributedDataParallel(model, gradient_as_bucket_view=False)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW)
    elif way == "named parameters":
        ddp = phalanx.DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(ddp.named_parameters(), optim.AdamW)
    else:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW)
    assert all_equal(train(ddp, optimizer, rank, 3), train(plain, optim.AdamW(plain.parameters()), rank, 3))


@on_ranks(2)
def test_a_gradient_scaler_works_as_with_the_plain_optimizer(rank):
    results = []
    for make in (optim.SGD, lambda params, lr: ZeroRedundancyOptimizer(params, optim.SGD, lr=lr)):
        ddp = wrapped()
        optimizer = make(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(3):
            optimizer.zero_grad()
            scale = float("inf") if step == 1 and rank == 0 else 1.0  # a step that all must skip
            scaler.scale(ddp(batch(rank, step)).square().mean() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((copy_parameters(ddp), scaler.get_scale()))
    assert all_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == 8.0


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"optimizer_class": optim.LBFGS}, ValueError, "does not support LBFGS: its direction and its line search"),
        ({"optimizer_class": "Adam"}, TypeError, "must be a subclass of torch.optim.Optimizer, got 'Adam'"),
        ({"overlap_with_ddp": True}, ValueError, "overlap_with_ddp=True on backend 'phalanx': it overlaps"),
        ({"differentiable": True}, ValueError, "differentiable=True: the update happens in other processes"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
    ],
)
@on_ranks(2)
def test_arguments_are_refused_with_the_reason(arguments, error, message):
    with pytest.raises(error, match=message):
        ZeroRedundancyOptimizer(Uneven().parameters(), **{"optimizer_class": optim.Adam, **arguments})


def test_without_a_group_it_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"needs a process group: call phalanx.init\(\)"):
        ZeroRedundancyOptimizer(Uneven().parameters(), optim.Adam)


def test_ranks_with_different_parameters_are_told_the_first_difference():
    def different(rank, world_size):
        ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3 + rank))], optim.Adam)

    with pytest.raises(
        RankFailed, match=r"Parameter 1 of the group is of shape \(4,\), float32, strides \(1,\) on rank 1"
    ) as failed:
        run_ranks(different, 2)
    assert "MismatchError" in str(failed.value)


@on_ranks(2)
def test_a_parameter_that_left_the_shared_memory_is_named():
    model = Uneven()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    model.double()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 \(shape \(\)\) was moved out of the memory"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_plain_optimizer_goes_on_with_the_model_of_a_sharded_one(is_dropped, rank):
    """Each rank updated the memory that both share: every step counted twice."""

    def train(make):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))
        optimizer = make(model.parameters())
        for step in range(6):
            if step == 3:
                kept = None if is_dropped else optimizer
                optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer.zero_grad()
            model(torch.randn(8, 9, generator=torch.Generator().manual_seed(step * 2 + rank))).square().sum().backward()
            optimizer.step()
            dist.barrier()
        if kept is not None and isinstance(kept, ZeroRedundancyOptimizer):
            with pytest.raises(RuntimeError, match="or the step of another optimizer"):
                kept.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    sharded = train(lambda parameters: ZeroRedundancyOptimizer(parameters, optim.SGD, lr=0.1))
    plain = train(lambda parameters: optim.SGD(parameters, lr=0.1))
    assert all(torch.equal(one, other) for one, other in zip(sharded, plain, strict=True))


@on_ranks(2)
def test_a_plain_optimizer_with_a_slice_of_the_gradient_is_refused():
    model = DistributedDataParallel(nn.Linear(300, 300))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, gather_gradients=False)
    model(torch.ones(1, 300)).sum().backward()
    with pytest.raises(RuntimeError, match=r"SGD.step: a parameter of shape \(300, 300\) belongs to a ZeroRedundancy"):
        optim.SGD(model.parameters(), lr=0.1).step()
    sharded.step()


@on_ranks(2)
def test_a_sparse_gradient_that_would_have_to_be_cut_is_refused():
    table = nn.Embedding(50, 16, sparse=True)
    optimizer = ZeroRedundancyOptimizer(table.parameters(), optim.SGD, lr=0.1)
    table(torch.tensor([3, 4])).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \(50, 16\) has a sparse gradient, but is cut"):
        optimizer.step()


@on_ranks(2)
def test_sparse_adam_updates_whole_tables():
    results = []
    for make in (
        lambda params: optim.SparseAdam(params),
        lambda params: ZeroRedundancyOptimizer(params, optim.SparseAdam),
    ):
        torch.manual_seed(0)
        table = nn.Embedding(50, 16, sparse=True)
        optimizer = make(list(table.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([step, 2 * step, 7])).square().sum().backward()
            optimizer.step()
        results.append(table.weight)
    assert torch.equal(*results)


@on_ranks(2)
def test_a_step_after_the_group_was_destroyed_is_refused():
    optimizer = ZeroRedundancyOptimizer(Uneven().parameters(), optim.Adam)
    dist.destroy_process_group()
    with pytest.raises(phalanx.ClosedError, match=r"step: group '0' was destroyed, or this process was forked"):
        optimizer.step()


@on_ranks(1)
def test_it_is_not_copied_or_pickled():
    optimizer = ZeroRedundancyOptimizer(Uneven().parameters(), optim.Adam)
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.deepcopy(optimizer)


def test_a_rank_whose_optimizer_fails_ends_the_step_for_all():
    class Fussy(optim.SGD):
        def step(self, closure=None):
            super().step()
            if dist.get_rank() == 1:
                raise ArithmeticError("not today")

    def fussy(rank, world_size):
        ddp = wrapped()
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), Fussy, lr=0.1)
        before = copy_parameters(ddp)
        backward(ddp, rank, 0)
        if rank == 1:
            with pytest.raises(ArithmeticError, match="not today"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="step 1 failed here, so the ranks are out of step"):
                optimizer.step()
            with contextlib.suppress(phalanx.PeerLostError):  # rank 0 may have seen it at the first sync, and be gone
                dist.barrier()  # the script goes on, into a call that rank 0 takes for the end of the step
            return None  # what it sees of rank 0's slices depends on how far that one is with putting them back
        else:
            with pytest.raises(phalanx.PeerLostError, match=r"rank 1 failed in this step\. All parameters have"):
                optimizer.step()
        return all_equal(copy_parameters(ddp), before)

    assert run_ranks(fussy, 2) == [True, None]


class Large(nn.Module):
    """Parameters that are cut between all ranks, among small ones; one is complex."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(192, 301)
        self.second = nn.Linear(301, 333)
        self.spectrum = nn.Parameter(torch.randn(333, 111, dtype=torch.complex64))

    def forward(self, images):
        hidden = torch.tanh(self.second(torch.tanh(self.first(images.flatten(1)))))
        return (hidden.to(torch.complex64) @ self.spectrum).abs()


_WITHOUT_GATHER = {"gather_gradients": False}


@pytest.mark.slow(but=("AdamW-2",))
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("made", [optim.AdamW, NormSGD])
def test_without_gathering_gradients_the_weights_are_the_same(world_size, made):
    def fn(rank, world_size):
        plain, sharded = phalanx.DistributedDataParallel(Large()), phalanx.DistributedDataParallel(Large())
        expected = train(plain, made(plain.parameters(), lr=0.01), rank, STEPS)
        optimizer = ZeroRedundancyOptimizer(sharded.parameters(), made, lr=0.01, **_WITHOUT_GATHER)
        assert all_equal(train(sharded, optimizer, rank, STEPS), expected)
        return all_equal([p.grad for p in sharded.parameters()], [p.grad for p in plain.parameters()])

    assert all(run_ranks(fn, world_size)) == (world_size == 1)


@on_ranks(2)
def test_without_gathering_gradients_a_gradient_scaler_is_refused_and_the_next_step_is_not(rank):
    """A rank sees an overflow in its slice only, and the others would step."""
    ddp = wrapped()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1, **_WITHOUT_GATHER)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(ddp(batch(rank, 0)).square().mean()).backward()
    with pytest.raises(RuntimeError, match="a GradScaler looks for overflows in whole gradients"):
        scaler.step(optimizer)
    optimizer.step()


@pytest.mark.slow(but=("2.0",))
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_its_own_clipping_is_that_of_torch_and_needs_no_gathered_gradients(norm_type):
    def fn(rank, world_size):
        plain, sharded = phalanx.DistributedDataParallel(Large()), phalanx.DistributedDataParallel(Large())
        one = optim.SGD(plain.parameters(), lr=0.1)
        other = ZeroRedundancyOptimizer(sharded.parameters(), optim.SGD, lr=0.1, **_WITHOUT_GATHER)
        for step in range(3):
            for ddp, optimizer in ((plain, one), (sharded, other)):
                optimizer.zero_grad()
                backward(ddp, rank, step)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
            norm = other.clip_grad_norm_(0.01, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)  # two ways to add 200,000 numbers
            one.step(), other.step()
        torch.testing.assert_close(copy_parameters(sharded), copy_parameters(plain))
        return norm.item()

    norms = run_ranks(fn, 3)
    assert len(set(norms)) == 1


@on_ranks(2)
def test_its_own_clipping_holds_for_gradients_that_lie_differently_than_their_parameters():
    """A gradient in another order of memory is copied to be cut; clipping scaled the copy, and the step took the
    gradient as it was: a transposed weight's gradient was never clipped."""
    plain, cut = nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False)
    cut.load_state_dict(plain.state_dict())
    dist.broadcast(plain.weight.data, 0), dist.broadcast(cut.weight.data, 0)
    one = optim.SGD(plain.parameters(), lr=0.1)
    other = ZeroRedundancyOptimizer(cut.parameters(), optim.SGD, lr=0.1)
    for layer in (plain, cut):
        layer.weight.grad = torch.arange(64.0 * 48).view(64, 48).t()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    norm = other.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, expected)
    one.step(), other.step()
    torch.testing.assert_close(cut.weight, plain.weight)


def test_a_later_optimizer_that_gathers_gets_all_gradients():
    # What the first one needed stayed in force: clipping for the second saw a slice of the mean, and nobody refused.
    def fn(rank, world_size):
        ddp = phalanx.DistributedDataParallel(Large())
        ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1, **_WITHOUT_GATHER)
        ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1)
        backward(ddp, rank, 0)
        return [p.grad.clone() for p in ddp.parameters()]

    first, second = run_ranks(fn, 2)
    assert all_equal(first, second)


def test_the_norm_of_double_parameters_is_double():
    def fn(rank, world_size):
        torch.manual_seed(0)
        ddp = phalanx.DistributedDataParallel(nn.Linear(30, 7, dtype=torch.float64))
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1)
        ddp(torch.full((2, 30), rank + 0.1, dtype=torch.float64)).square().sum().backward()
        expected = nn.utils.get_total_norm([p.grad for p in ddp.parameters()])
        norm = optimizer.clip_grad_norm_(0.01)
        torch.testing.assert_close(norm, expected)
        return norm.item()

    assert len(set(run_ranks(fn, 2))) == 1


@on_ranks(2)
def test_a_norm_that_is_not_finite_can_be_an_error(rank):
    ddp = wrapped()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1)
    backward(ddp, rank, 0)
    ddp.module.hidden.weight.grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 is nan"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type must be above zero"):
        optimizer.clip_grad_norm_(1.0, norm_type=0)


@on_ranks(2)
def test_gradients_changed_by_whoever_sees_a_slice_only_are_refused(rank):
    ddp = phalanx.DistributedDataParallel(Large())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1, **_WITHOUT_GATHER)
    backward(ddp, rank, 0)
    nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
    with pytest.raises(RuntimeError, match=r"was changed after backward.*optimizer\.clip_grad_norm_"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"still holds the mean of the previous backward.*zero_grad"):
        backward(ddp, rank, 1)


@on_ranks(2)
def test_gradients_accumulate_under_no_sync_without_gathering(rank):
    plain, sharded = phalanx.DistributedDataParallel(Large()), phalanx.DistributedDataParallel(Large())
    one = optim.SGD(plain.parameters(), lr=0.1)
    other = ZeroRedundancyOptimizer(sharded.parameters(), optim.SGD, lr=0.1, **_WITHOUT_GATHER)
    for step in range(3):
        for ddp, optimizer in ((plain, one), (sharded, other)):
            optimizer.zero_grad()
            with ddp.no_sync():
                backward(ddp, rank, 10 * step)
            backward(ddp, rank, 10 * step + 1)
            optimizer.step()
    assert all_equal(copy_parameters(sharded), copy_parameters(plain))


_STEP = """
import sys, tempfile
import torch
import torch.distributed as dist
from phalanx import DistributedDataParallel, ZeroRedundancyOptimizer

store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("phalanx", store=store, rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
for optimizer_class in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop):
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    optimizer.consolidate_state_dict()
    optimizer.load_state_dict(optimizer.state_dict())
dist.destroy_process_group()
sys.exit(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "sympy")))[:3] or 0)
"""


@pytest.mark.slow
def test_training_does_not_import_the_compiler():
    """torch's optimizers import Dynamo when they are built and when they step, and so did the wrapper's first forward.

    That was half a second and 70 MB of each rank, for programs that compile nothing.
    """
    done = subprocess.run([sys.executable, "-c", _STEP], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
