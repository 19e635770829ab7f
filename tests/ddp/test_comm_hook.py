import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from phalanx import DistributedDataParallel
from phalanx.testing import run_ranks


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def _backward(model, rank):
    model(torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))).square().mean().backward()


def _gradients_with(hook, state, rank, *, wrap=DistributedDataParallel):
    ddp = wrap(_model())
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    for _ in range(3):
        ddp.zero_grad()
        _backward(ddp, rank)
    return [parameter.grad.clone() for parameter in ddp.parameters()]


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        (default_hooks.allreduce_hook, 1e-6),
        (default_hooks.fp16_compress_hook, 1e-3),
        (default_hooks.bf16_compress_hook, 1e-2),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 1e-3),
    ],
    ids=["allreduce", "fp16", "bf16", "fp16_wrapper"],
)
def test_pytorchs_hooks_leave_the_mean(backend, hook, tolerance):
    def fn(rank, world_size):
        plain, hooked = _gradients_with(None, None, rank), _gradients_with(hook, dist.group.WORLD, rank)
        for mine, reference in zip(hooked, plain, strict=True):
            torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)

    run_ranks(fn, 2, backend=backend)


def test_power_sgd_gives_what_it_gives_under_pytorchs_own(backend):
    def fn(rank, world_size):
        def gradients(wrap):
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            return _gradients_with(powerSGD_hook.powerSGD_hook, state, rank, wrap=wrap)

        theirs = gradients(nn.parallel.DistributedDataParallel)
        for mine, reference in zip(gradients(DistributedDataParallel), theirs, strict=True):
            torch.testing.assert_close(mine, reference)

    run_ranks(fn, 2, backend=backend)


def test_a_hook_sees_the_bucket_as_pytorchs_interface_describes_it():
    def fn(rank, world_size):
        seen = []

        def hook(state, bucket):
            assert state == "state"
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                assert gradient.shape == parameter.shape
                assert gradient.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
            seen.append((bucket.index(), bucket.is_last()))
            future = torch.futures.Future()
            future.set_result(bucket.buffer() * 2)  # a new tensor: it has to be copied into the bucket
            return future

        model = _model()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
        ddp.register_comm_hook("state", hook)
        _backward(ddp, rank)
        alone = _model()
        _backward(alone, rank)
        for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                mine.grad, 2 * reference.grad
            )  # local: the hook talked to nobody, nothing is divided
        return seen

    seen = run_ranks(fn, 2, backend="gloo")[0]
    assert seen == [(index, index == len(seen) - 1) for index in range(len(seen))]
    assert len(seen) > 1


def _finished(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (
            lambda state, bucket: None,
            TypeError,
            r"returned NoneType for bucket 0; it must return a torch\.futures\.Future",
        ),
        (lambda state, bucket: _finished("text"), TypeError, "future of bucket 0 holds str, not a tensor"),
        (lambda state, bucket: _finished(torch.ones(1)), ValueError, "returned 1 elements for bucket 0, which has"),
    ],
)
def test_a_hook_that_breaks_the_contract_is_told_what_it_returned(hook, error, message):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(_model())
        ddp.register_comm_hook(None, hook)
        with pytest.raises(error, match=message):
            _backward(ddp, rank)

    run_ranks(fn, 1, backend="gloo")


def test_wrong_registrations_are_refused():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(_model())
        with pytest.raises(TypeError, match="must be callable, got int"):
            ddp.register_comm_hook(None, 3)
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        with pytest.raises(RuntimeError, match="once per module"):
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        sparse = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
        with pytest.raises(RuntimeError, match="'weight' has sparse gradients"):
            sparse.register_comm_hook(None, default_hooks.allreduce_hook)

    run_ranks(fn, 1, backend="gloo")
