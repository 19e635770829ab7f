import warnings

import pytest
import torch
import torch.distributed as dist
from tests.small_models import batch_of, mlp
from tests.training import copy_gradients
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # this package still uses torch.jit.script
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim
    from torch.distributed.algorithms.ddp_comm_hooks import (
        ddp_zero_hook,
        default_hooks,
        mixed_precision_hooks,
        optimizer_overlap_hooks,
        powerSGD_hook,
        quantization_hooks,
    )
    from torch.distributed.optim import _apply_optimizer_in_backward

from tests.on_ranks import on_ranks

from phalanx import DistributedDataParallel
from phalanx.testing import run_ranks


def _backward(model, rank):
    model(batch_of(rank)).square().mean().backward()


def _gradients_with(hook, state, rank, *, wrap=DistributedDataParallel):
    ddp = wrap(mlp())
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    for _ in range(3):
        ddp.zero_grad()
        _backward(ddp, rank)
    return copy_gradients(ddp)


@pytest.mark.slow(but=("phalanx-fp16_wrapper",))
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
@on_ranks(2)
def test_pytorchs_hooks_leave_the_mean(rank, backend, hook, tolerance):
    plain, hooked = _gradients_with(None, None, rank), _gradients_with(hook, dist.group.WORLD, rank)
    torch.testing.assert_close(hooked, plain, rtol=tolerance, atol=tolerance)


@on_ranks(2)
def test_power_sgd_gives_what_it_gives_under_pytorchs_own(rank, backend):
    def gradients(wrap):
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        return _gradients_with(powerSGD_hook.powerSGD_hook, state, rank, wrap=wrap)

    theirs = gradients(nn.parallel.DistributedDataParallel)
    torch.testing.assert_close(gradients(DistributedDataParallel), theirs)


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

        model = mlp()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
        ddp.register_comm_hook("state", hook)
        _backward(ddp, rank)
        alone = mlp()
        _backward(alone, rank)
        # Local: the hook talked to nobody, nothing is divided.
        torch.testing.assert_close(copy_gradients(model), [2 * gradient for gradient in copy_gradients(alone)])
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
@on_ranks(1, backend="gloo")
def test_a_hook_that_breaks_the_contract_is_told_what_it_returned(rank, hook, error, message):
    ddp = DistributedDataParallel(mlp())
    ddp.register_comm_hook(None, hook)
    with pytest.raises(error, match=message):
        _backward(ddp, rank)


class _Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs):
        return (self.weight * inputs * self.scale).abs()


@on_ranks(2)
def test_complex_gradients_go_through_a_hook_as_real_numbers(rank, backend):
    inputs = torch.complex(torch.tensor(1.0 + rank), torch.tensor(2.0))
    hooked, plain = DistributedDataParallel(_Complex()), DistributedDataParallel(_Complex())
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for ddp in (hooked, plain):
        (ddp(inputs) * torch.arange(1.0, 7.0).view(3, 2)).sum().backward()
    torch.testing.assert_close(copy_gradients(hooked), copy_gradients(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS])
@on_ranks(2)
def test_pytorchs_built_in_hooks_leave_the_mean(rank, backend, kind):
    hooked, plain = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
    hooked._register_builtin_comm_hook(kind)
    for ddp in (hooked, plain):
        _backward(ddp, rank)
    torch.testing.assert_close(copy_gradients(hooked), copy_gradients(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("hook", [default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook])
@on_ranks(2)
def test_compression_takes_gradients_of_any_real_dtype_and_shows_what_is_not_finite(rank, backend, dtype, hook):
    model = nn.Linear(4, 3).to(dtype)
    model.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float32))  # a bucket without an element
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(None, hook)
    ddp(torch.full((2, 4), float(rank + 1), dtype=dtype)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 3.0))
    model.zero_grad()
    inputs = torch.ones(2, 4, dtype=dtype)
    inputs[0, 1] = float("nan") if rank else float("inf")
    ddp(inputs).sum().backward()
    assert model.weight.grad[:, 1].isnan().all()
    assert model.weight.grad[:, 0].isfinite().all()


def _applying_optim_in_backward():
    """Make PyTorch's hook; it makes a stream first, for which a build with CUDA needs a driver."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            patch.setattr(torch, "Stream", lambda: None)
        return optimizer_overlap_hooks._apply_optim_in_backward_hook(True)


@on_ranks(1, backend="gloo")
def test_hooks_that_cannot_work_are_refused_with_what_to_use_instead():
    fused = _as_overlapped_optim(torch.optim.SGD, None, lr=0.1)._opt_hook_state
    refused = [
        (mixed_precision_hooks._reducer_allreduce_and_upcast_hook, r"mixed_precision.*Use torch\.autocast"),
        (optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, fused), r"step\(\) after"),
        (_applying_optim_in_backward(), r"step\(\) after"),
        (ddp_zero_hook._hook_with_zero_step_setup, "Use phalanx.ZeroRedundancyOptimizer without a hook"),
        (
            quantization_hooks.quantization_pertensor_hook,
            r"the future of NCCL's all_gather.*On Gloo, use bf16_compress_hook.*phalanx\.Options\(wire_dtype",
        ),
        (quantization_hooks.quantization_perchannel_hook, "the future of NCCL's all_gather"),
        (powerSGD_hook.batched_powerSGD_hook, "it resizes the bucket.*Use powerSGD_hook"),
    ]
    ddp = DistributedDataParallel(mlp())
    for hook, message in refused:
        with pytest.raises(ValueError, match=message):
            ddp.register_comm_hook(None, hook)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)  # none of them has left anything behind


@on_ranks(1, backend="gloo")
def test_an_optimizer_that_steps_inside_backward_is_refused():
    model = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, model[2].parameters(), {"lr": 0.1}, register_hook=False)
    with pytest.raises(RuntimeError, match=r"'2\.weight' has an optimizer that steps inside backward"):
        DistributedDataParallel(model)


@on_ranks(1, backend="gloo")
def test_wrong_registrations_are_refused():
    ddp = DistributedDataParallel(mlp())
    with pytest.raises(TypeError, match="must be callable, got int"):
        ddp.register_comm_hook(None, 3)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="once per module"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    sparse = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(RuntimeError, match="'weight' has sparse gradients"):
        sparse.register_comm_hook(None, default_hooks.allreduce_hook)
