"""What backward leaves in `.grad`, compared with the mean of the gradients that plain copies of the model compute."""

import copy
import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from tests.small_models import batch_of, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx import DistributedDataParallel, PeerLostError
from phalanx.ddp.exchange import SharedExchange, WorkExchange
from phalanx.testing import run_ranks


def _mean_gradients(model, backward, world_size):
    """What all ranks should hold: `backward(model, rank)` run here for each rank, and the mean of what it leaves."""
    sums = {}
    for rank in range(world_size):
        replica = copy.deepcopy(model)
        backward(replica, rank)
        for name, parameter in replica.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad.to_dense() / world_size
    return sums


def _assert_gradients(ddp, expected, **tolerance):
    named = dict(ddp.module.named_parameters())
    for name, parameter in named.items():
        if name in expected:
            torch.testing.assert_close(parameter.grad.to_dense(), expected[name], **tolerance)
        else:
            assert parameter.grad is None, name


def _agrees(backward, build=mlp, rounds=2, **options):
    """A rank's function: `backward(model, rank)` through the wrapper leaves the mean over ranks, every time."""

    def fn(rank, world_size):
        model = build()
        expected = _mean_gradients(model, backward, world_size)
        ddp = DistributedDataParallel(model, **options)
        for _ in range(rounds):
            ddp.zero_grad()
            backward(ddp, rank)
            _assert_gradients(ddp, expected)

    return fn


def _plain(model, rank):
    model(batch_of(rank)).square().mean().backward()


@pytest.mark.slow(but=("phalanx-2", "phalanx-3"))
@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 2), ("phalanx", 1), ("phalanx", 2), ("phalanx", 3)])
@on_ranks()
def test_backward_leaves_the_mean_on_every_rank(rank, world_size, backend):
    for as_view in (True, False):
        _agrees(_plain, bucket_cap_mb=0.0001, gradient_as_bucket_view=as_view)(rank, world_size)


@on_ranks(2)
def test_gradients_are_views_of_bucket_memory_unless_told_otherwise(rank, backend):
    ddp = DistributedDataParallel(mlp())
    _plain(ddp, rank)
    first = ddp.module[0].weight.grad.data_ptr()
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in ddp.parameters()}) == 1
    ddp.zero_grad()
    _plain(ddp, rank)
    assert ddp.module[0].weight.grad.data_ptr() == first  # nobody kept it

    separate = DistributedDataParallel(mlp(), gradient_as_bucket_view=False)
    _plain(separate, rank)
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in separate.parameters()}) == 4


def test_buckets_of_the_shared_heap_are_reduced_where_they_lie_also_after_they_are_rebuilt():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)
        for _ in range(2):
            assert isinstance(ddp._reducer._set.exchange, SharedExchange)
            _plain(ddp, rank)
        symm_mem = dist.group.WORLD.transport.symm_mem
        return [symm_mem.heap_offset(parameter.grad.data_ptr()) for parameter in ddp.parameters()]  # raises outside

    mine, other = run_ranks(fn, 2)
    assert mine == other


@on_ranks(2)
def test_ranks_that_can_not_share_memory_get_the_mean_over_the_backend_that_stands_in(rank, world_size, monkeypatch):
    monkeypatch.setattr("phalanx._comm.backend.create._cannot_share", lambda *_: "the test says so")
    group = dist.new_group()
    ddp = DistributedDataParallel(mlp(), process_group=group)
    assert isinstance(ddp._reducer._set.exchange, WorkExchange)
    _plain(ddp, rank)
    _assert_gradients(ddp, _mean_gradients(mlp(), _plain, world_size))


@on_ranks(2, backend="gloo")
def test_without_the_c_core_gloo_still_leaves_the_mean(rank, world_size):
    for name in [
        name
        for name in sys.modules
        if name.startswith(("phalanx.ddp", "phalanx._comm.backend", "phalanx._comm.symmetric_memory"))
    ]:
        del sys.modules[name]
    sys.modules["phalanx._core"] = None  # importing it fails
    from phalanx.ddp import DistributedDataParallel as Fresh

    ddp = Fresh(mlp())
    _plain(ddp, rank)
    _assert_gradients(ddp, _mean_gradients(mlp(), _plain, world_size))


@on_ranks(2)
def test_an_empty_bucket_and_none_but_empty_buckets_are_averaged(rank, world_size, backend):
    class Empty(nn.Module):
        def __init__(self, *shapes):
            super().__init__()
            self.weights = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape, dtype in shapes)

        def forward(self, inputs):
            return sum((weight.sum().float() * inputs.sum() for weight in self.weights), torch.zeros(()))

    nothing = (0, 2), torch.bfloat16
    for shapes in ([nothing], [nothing, ((3,), torch.float32)]):
        _agrees(_plain, build=lambda shapes=shapes: Empty(*shapes))(rank, world_size)


@on_ranks(2)
def test_gradients_that_the_user_replaced_are_accumulated_on(rank, world_size, backend):
    ddp = DistributedDataParallel(mlp())
    expected = _mean_gradients(mlp(), _plain, world_size)
    _plain(ddp, rank)
    for parameter in ddp.parameters():
        parameter.grad = torch.ones_like(parameter)
    _plain(ddp, rank)
    _assert_gradients(ddp, {name: gradient + 1 for name, gradient in expected.items()})


@pytest.mark.parametrize("as_view", [True, False])
@on_ranks(2)
def test_other_memory_under_a_gradient_is_accumulated_on(rank, world_size, backend, as_view):
    # With gradient_as_bucket_view=True PyTorch's own loses the mean here.
    ddp = DistributedDataParallel(mlp(), gradient_as_bucket_view=as_view)
    expected = _mean_gradients(mlp(), _plain, world_size)
    _plain(ddp, rank)
    for parameter in ddp.parameters():
        parameter.grad.data = torch.ones_like(parameter)
    _plain(ddp, rank)
    _assert_gradients(ddp, {name: gradient + 1 for name, gradient in expected.items()})


@on_ranks(3)
def test_without_zeroing_gradients_accumulate(rank, world_size, backend):
    ddp = DistributedDataParallel(mlp())
    expected = _mean_gradients(mlp(), _plain, world_size)
    for count in (1, 2, 3):
        _plain(ddp, rank)
        _assert_gradients(ddp, {name: count * gradient for name, gradient in expected.items()})


@pytest.mark.parametrize("as_view", [True, False])
def test_no_sync_accumulates_here_and_the_next_backward_averages_the_sum(backend, as_view):
    def micro(model, rank, step):
        model(batch_of(rank, step)).square().mean().backward()

    def three(model, rank):
        for step in range(3):
            micro(model, rank, step)

    def fn(rank, world_size):
        model = mlp()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        for _ in range(2):
            ddp.zero_grad()
            with ddp.no_sync():
                micro(ddp, rank, 0)
                local = model[0].weight.grad.clone()
                micro(ddp, rank, 1)
            everyone = [torch.empty_like(local) for _ in range(world_size)]
            dist.all_gather(everyone, local)
            assert not torch.equal(everyone[0], everyone[1])  # nothing was averaged inside
            micro(ddp, rank, 2)
            _assert_gradients(ddp, _mean_gradients(mlp(), three, world_size))

    run_ranks(fn, 2, backend=backend)


def test_a_static_graph_may_begin_with_accumulation():
    # PyTorch's own ends in an internal assertion: "expect_autograd_hooks_ INTERNAL ASSERT FAILED".
    def both(model, rank):
        for step in range(2):
            model(batch_of(rank, step)).square().mean().backward()

    def fn(rank, world_size):
        ddp = DistributedDataParallel(mlp(), static_graph=True)
        expected = _mean_gradients(mlp(), both, world_size)
        for _ in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(batch_of(rank, 0)).square().mean().backward()
            ddp(batch_of(rank, 1)).square().mean().backward()
            _assert_gradients(ddp, expected)

    run_ranks(fn, 2)


@on_ranks(2, backend="gloo")
def test_each_forward_decides_for_its_own_backward(rank, world_size):
    # In PyTorch the first backward after a forward that syncs averages, even if it belongs to another forward.
    ddp = DistributedDataParallel(mlp())
    synced = ddp(batch_of(rank, 0)).square().mean()
    with ddp.no_sync():
        local = ddp(batch_of(rank, 1)).square().mean()
    local.backward()
    kept = ddp.module[0].weight.grad.clone()
    everyone = [torch.empty_like(kept) for _ in range(world_size)]
    dist.all_gather(everyone, kept)
    assert not torch.equal(everyone[0], everyone[1])
    synced.backward()

    def both(model, rank):
        (model(batch_of(rank, 0)).square().mean() + model(batch_of(rank, 1)).square().mean()).backward()

    _assert_gradients(ddp, _mean_gradients(mlp(), both, world_size))


def _two_forwards_one_backward(model, rank):
    (model(batch_of(rank, 0)).square().mean() + model(batch_of(rank, 1)).abs().mean()).backward()


def _two_forwards_two_backwards(model, rank):
    first, second = model(batch_of(rank, 0)).square().mean(), model(batch_of(rank, 1)).abs().mean()
    first.backward()
    second.backward()


def _twice_through_one_graph(model, rank):
    output = model(batch_of(rank))
    output.square().mean().backward(retain_graph=True)
    output.abs().mean().backward()


@pytest.mark.parametrize(
    "backward", [_two_forwards_one_backward, _two_forwards_two_backwards, _twice_through_one_graph]
)
@on_ranks(2)
def test_several_forwards_and_backwards_leave_the_mean_of_their_sum(rank, world_size, backend, backward):
    # After two forwards and two backwards PyTorch's gradients differ between ranks: it averages only the first.
    for find_unused in (False, True):
        _agrees(backward, find_unused_parameters=find_unused)(rank, world_size)


def test_buckets_are_rebuilt_in_the_order_of_readiness():
    class Backwards(nn.Module):
        """Uses its layers in the reverse order of registration."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, inputs):
            return self.first(self.second(self.third(inputs)))

    def fn(rank, world_size):
        ddp = DistributedDataParallel(Backwards(), bucket_cap_mb=0.0001)
        before = [slot.name for bucket in ddp.plan.buckets for slot in bucket.slots]
        expected = _mean_gradients(Backwards(), _plain, world_size)
        for _ in range(3):
            ddp.zero_grad()
            _plain(ddp, rank)
            _assert_gradients(ddp, expected)  # the first of these reads what was moved into the new buckets
        after = [slot.name for bucket in ddp.plan.buckets for slot in bucket.slots]
        return before, after

    (before, after), other = run_ranks(fn, 2, backend="gloo")
    assert before[0] == "third.bias"
    assert [name.partition(".")[0] for name in after] == ["first"] * 2 + ["second"] * 2 + ["third"] * 2
    assert other == (before, after)


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs):
        return self.head(self.embed(inputs.argmax(-1)))


def _frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


def _channels_last():
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 5, 2, padding=1), nn.Flatten()).to(
        memory_format=torch.channels_last
    )


class _Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.none, self.one = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.none.sum() + self.one * inputs


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.body, self.use_reentrant = mlp(), use_reentrant
        self.stem = nn.Linear(6, 6)

    def forward(self, inputs):
        return checkpoint(self.body, self.stem(inputs), use_reentrant=self.use_reentrant)


@pytest.mark.slow(but=("phalanx-tied", "phalanx-frozen"))
@pytest.mark.parametrize(
    "build",
    [
        _Tied,
        _frozen,
        _channels_last,
        _Empty,
        lambda: _Checkpointed(use_reentrant=True),
        lambda: _Checkpointed(use_reentrant=False),
    ],
    ids=["tied", "frozen", "channels_last", "empty", "checkpoint_reentrant", "checkpoint"],
)
@on_ranks(2)
def test_models_of_every_kind_get_the_mean(rank, world_size, backend, build):
    def seeded():
        torch.manual_seed(0)
        return build()

    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        _agrees(_plain, build=seeded, rounds=3, bucket_cap_mb=0.0001, **options)(rank, world_size)


@pytest.mark.slow
def test_compiled_modules_get_the_mean_inside_and_outside_the_wrapper():
    def compiled(model, rank):
        _plain(torch.compile(model, backend="eager"), rank)

    def fn(rank, world_size):
        _agrees(_plain, build=lambda: torch.compile(mlp(), backend="eager"))(rank, world_size)
        _agrees(compiled)(rank, world_size)

    run_ranks(fn, 2, backend="gloo")


def test_a_wrapped_module_inside_a_checkpoint_gets_the_mean():
    def fn(rank, world_size, use_reentrant):
        def backward(model, rank):
            inputs = batch_of(rank).requires_grad_()
            checkpoint(model, inputs, use_reentrant=use_reentrant).square().mean().backward()

        _agrees(backward)(rank, world_size)

    for use_reentrant in (True, False):
        run_ranks(fn, 2, use_reentrant, backend="gloo")


def test_a_module_that_reentrant_checkpointing_reaches_twice_needs_a_static_graph():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 6)

        def forward(self, inputs):
            hidden = checkpoint(self.layer, inputs.requires_grad_(), use_reentrant=True)
            return checkpoint(self.layer, hidden, use_reentrant=True)

    def refused(rank, world_size):
        with pytest.raises(RuntimeError, match=r"'layer\.\w+' \(Linear\) received another gradient.*static_graph=True"):
            _plain(DistributedDataParallel(Twice(), bucket_cap_mb=0.0001), rank)

    run_ranks(refused, 2, backend="gloo")
    run_ranks(_agrees(_plain, build=Twice, rounds=3, static_graph=True), 2, backend="gloo")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@on_ranks(2)
def test_every_floating_dtype_gets_the_mean(rank, world_size, backend, dtype):
    def build():
        torch.manual_seed(0)
        return nn.Linear(6, 7, dtype=dtype)

    def backward(model, rank):
        model(batch_of(rank).to(dtype)).abs().square().mean().backward()

    expected = _mean_gradients(build(), backward, world_size)
    ddp = DistributedDataParallel(build())
    backward(ddp, rank)
    _assert_gradients(ddp, expected, rtol=2e-2, atol=1e-2) if dtype.itemsize == 2 else _assert_gradients(ddp, expected)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@on_ranks(3)
def test_sparse_gradients_of_embeddings_are_averaged_and_stay_sparse(rank, world_size, backend, kind):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(kind(11, 4, sparse=True), nn.Linear(4, 2))

    def backward(model, rank):  # another number of rows on every rank, none on rank 0
        rows = torch.arange(2 * rank).reshape(-1, 1) % 11
        model(rows).sum().backward()

    expected = _mean_gradients(build(), backward, world_size)
    ddp = DistributedDataParallel(build())
    for _ in range(2):
        ddp.zero_grad()
        backward(ddp, rank)
        assert ddp.module[0].weight.grad.is_sparse
        _assert_gradients(ddp, expected)


@on_ranks(1, backend="gloo")
def test_a_dense_gradient_of_a_sparse_parameter_is_refused_by_name():
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    with pytest.raises(RuntimeError, match=r"Gradient of '0\.weight' is dense"):
        (ddp(torch.tensor([1])).sum() + ddp.module[0].weight.sum()).backward()


@on_ranks(1, backend="gloo")
def test_a_sparse_gradient_that_no_module_announced_is_refused_by_name():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 2))

        def forward(self, rows):
            return nn.functional.embedding(rows, self.table, sparse=True)

    ddp = DistributedDataParallel(Functional())
    with pytest.raises(RuntimeError, match="Gradient of 'table' is sparse, but was planned as dense"):
        ddp(torch.tensor([1])).sum().backward()


@on_ranks(1, backend="gloo")
def test_double_backward_is_refused_by_name(rank):
    ddp = DistributedDataParallel(mlp())
    with pytest.raises(RuntimeError, match=r"Gradient of '2\.bias': backward\(create_graph=True\).*is refused"):
        ddp(batch_of(rank)).square().mean().backward(create_graph=True)


def test_a_gradient_penalty_through_autograd_grad_gets_the_mean():
    def penalty(model, rank):
        inputs = batch_of(rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        (model(inputs).square().mean() + slope.square().sum()).backward()

    run_ranks(_agrees(penalty), 2, backend="gloo")


@pytest.mark.parametrize("zero", [True, False])
@on_ranks(1, backend="gloo")
def test_a_module_converted_after_wrapping_is_refused_by_name(rank, zero):
    ddp = DistributedDataParallel(mlp())
    _plain(ddp, rank)
    ddp.double()
    if zero:
        ddp.zero_grad()
    with pytest.raises(RuntimeError, match=r"'2\.bias' is torch\.float64 on cpu with 4 elements, .* torch\.float32"):
        ddp(batch_of(rank).double()).sum().backward()


@on_ranks(2, backend="gloo")
def test_a_module_converted_there_and_back_still_gets_the_mean(rank, world_size):
    expected = _mean_gradients(mlp(), _plain, world_size)
    ddp = DistributedDataParallel(mlp())
    _plain(ddp, rank)
    ddp.double().float()  # swaps the memory under each gradient
    ddp.zero_grad(set_to_none=False)
    _plain(ddp, rank)
    _assert_gradients(ddp, expected)


@on_ranks(2, backend="gloo")
def test_an_interrupted_backward_before_any_bucket_was_sent_is_forgotten(rank, world_size):
    def explode(_gradient):
        raise KeyError("user code")

    ddp = DistributedDataParallel(mlp())
    output = ddp(batch_of(rank))
    loss = output.square().mean()
    handle = output.register_hook(explode)
    with pytest.raises(KeyError):
        loss.backward()
    handle.remove()
    ddp.zero_grad()
    _plain(ddp, rank)
    _assert_gradients(ddp, _mean_gradients(mlp(), _plain, world_size))


@on_ranks(2)
def test_after_an_interrupted_backward_a_loop_may_go_on_accumulating(rank):
    """The interrupted backward decided for the next one, although that was inside no_sync."""
    model = DistributedDataParallel(mlp(), check=False)

    def loss_of():
        return model(batch_of(rank)).square().mean()

    for _ in range(2):
        loss_of().backward()
    handle = list(model.parameters())[-1].register_post_accumulate_grad_hook(_out_of_memory)  # the first to come
    with pytest.raises(MemoryError):
        loss_of().backward()
    handle.remove()
    model.zero_grad()
    with model.no_sync():
        loss_of().backward()
    own = [parameter.grad.clone() for parameter in model.parameters()]
    loss_of().backward()
    for parameter, mine in zip(model.parameters(), own, strict=True):
        expected = 2 * mine
        dist.all_reduce(expected)
        torch.testing.assert_close(parameter.grad, expected / 2)


def _out_of_memory(parameter):
    raise MemoryError


@on_ranks(2, backend="gloo")
def test_a_backward_interrupted_between_buckets_is_an_error_of_the_next_forward(rank):
    def explode(_parameter):
        raise KeyError("user code")

    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)
    ddp.module[0].weight.register_post_accumulate_grad_hook(explode)
    with pytest.raises(KeyError):
        _plain(ddp, rank)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"rank \d: the backward before this forward was interrupted after \d of"
        ):
            ddp(batch_of(rank))


def test_after_a_lost_rank_ended_a_backward_the_next_forward_says_so_each_time():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(mlp())
        _plain(ddp, rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError, match="rank 1"):
            _plain(ddp, rank)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="was interrupted after 1 of 1 buckets"):
                ddp(batch_of(rank))
        return True

    assert run_ranks(fn, 2, lost=[1]) == [True, None]


def test_a_rank_that_dies_in_backward_is_named_by_the_others():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)
        _plain(ddp, rank)
        if rank == 1:
            ddp.module[0].weight.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeerLostError, match="rank 1") as caught:
            _plain(ddp, rank)
        return caught.value.ranks

    assert run_ranks(fn, 3, lost=[1]) == [(1,), None, (1,)]
