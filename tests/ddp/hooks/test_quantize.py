"""int8 with error feedback: few bytes, the same bits everywhere, and nothing lost, only late."""

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.ddp.hooks.models import Awkward, backward, gradients
from torch import nn

from phalanx import DistributedDataParallel
from phalanx.ddp.hooks import QuantizationState, fp16_compress_wrapper, quantize_hook
from phalanx.testing import run_ranks

STEPS = 6


def _everybodys(value):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


def _mean(dicts):
    return {name: sum(one[name].double() for one in dicts) / len(dicts) for name in dicts[0]}


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_was_applied_and_what_is_kept_add_up_to_the_true_gradients(world_size):
    def fn(rank, world_size):
        plain, quantised = DistributedDataParallel(Awkward()), DistributedDataParallel(Awkward(), bucket_cap_mb=0.0003)
        state = QuantizationState(block_size=64)
        quantised.register_comm_hook(state, quantize_hook)
        true, applied = None, None
        for step in range(STEPS):
            for ddp in (plain, quantised):
                ddp.zero_grad()
                backward(ddp, rank, step)
            one, other = gradients(plain), gradients(quantised)
            assert_equal(other, _everybodys(other)[0])
            true = one if true is None else {name: true[name] + one[name] for name in one}
            applied = other if applied is None else {name: applied[name] + other[name] for name in other}
            for name, gradient in one.items():  # no single step is far off: two roundings of at most 1/254 each
                if gradient.numel():
                    assert (other[name] - gradient).abs().max() <= 0.05 * gradient.abs().max() + 2e-3, (name, step)
        kept = state.state_dict(quantised.named_parameters())["residual"]
        late = _mean(_everybodys({name: kept.get(name, torch.zeros(1)) for name in true}))
        for name, total in true.items():
            # The residual lies in the order of memory, as gradients in a bucket do.
            ours = applied[name].permute(0, 2, 3, 1) if applied[name].dim() == 4 else applied[name]
            reference = total.permute(0, 2, 3, 1) if total.dim() == 4 else total
            added = ours.reshape(-1).double() + late[name]
            torch.testing.assert_close(added, reference.reshape(-1).double(), rtol=1e-4, atol=1e-6)
        assert len(quantised.plan.buckets) > 2
        return state.bytes_sent

    sent = run_ranks(fn, world_size)
    numel = sum(p.numel() for p in Awkward().parameters())
    if world_size == 1:
        assert sent == [0]
    else:
        full = 2 * (world_size - 1) / world_size * 4 * numel * STEPS
        assert max(sent) < 0.45 * full  # small buckets are filled up to whole blocks; large ones come close to 0.25


def test_large_buckets_take_a_quarter_of_the_bytes(backend):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(nn.Linear(300, 400))
        state = QuantizationState()
        ddp.register_comm_hook(state, quantize_hook)
        ddp(torch.randn(2, 300)).sum().backward()
        return state.bytes_sent

    for sent in run_ranks(fn, 2, backend=backend):
        assert 0.25 < sent / (4 * 300 * 400) < 0.26


def test_without_feedback_what_is_lost_is_lost():
    def fn(rank, world_size):
        sums = []
        for feedback in (True, False):
            ddp = DistributedDataParallel(nn.Linear(8, 1, bias=False))
            state = QuantizationState(block_size=8, use_error_feedback=feedback)
            ddp.register_comm_hook(state, quantize_hook)
            inputs = torch.full((1, 8), 0.001)  # less than half a step of the largest: rounded to zero every time
            inputs[0, 0] = 1.0
            total = torch.zeros(8)
            for _ in range(20):
                ddp.zero_grad()
                ddp(inputs).sum().backward()
                total += ddp.module.weight.grad[0]
            sums.append(total)
        return sums

    with_feedback, without = run_ranks(fn, 2)[0]
    assert without[1:].abs().max() == 0
    torch.testing.assert_close(with_feedback[1:], torch.full((7,), 0.02), rtol=0, atol=0.009)


@pytest.mark.slow(but=("gloo-dtype0",))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_gloo_and_pytorchs_own_wrapper(backend, dtype):
    def fn(rank, world_size):
        for wrap, hook in [
            (DistributedDataParallel, quantize_hook),
            (DistributedDataParallel, fp16_compress_wrapper(quantize_hook)),
            (nn.parallel.DistributedDataParallel, quantize_hook),
        ]:
            plain, quantised = DistributedDataParallel(Awkward(dtype)), wrap(Awkward(dtype), bucket_cap_mb=0.0003)
            quantised.register_comm_hook(QuantizationState(), hook)
            for step in range(2):
                for ddp in (plain, quantised):
                    ddp.zero_grad()
                    backward(ddp, rank, step)
            pairs = zip(gradients(plain).values(), gradients(quantised).values(), strict=True)
            for reference, mine in pairs:
                assert mine.dtype == dtype
                torch.testing.assert_close(mine, reference, rtol=0.05, atol=0.02)

    run_ranks(fn, 2, backend=backend)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_forgotten_by_the_next_step(bad):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(nn.Linear(4, 2, bias=False))
        ddp.register_comm_hook(QuantizationState(block_size=4), quantize_hook)
        inputs = torch.ones(1, 4)
        if rank == 1:
            inputs[0, 2] = bad
        ddp(inputs).sum().backward()
        assert not ddp.module.weight.grad.isfinite().any()
        ddp.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
        assert torch.equal(ddp.module.weight.grad, torch.ones(2, 4))

    run_ranks(fn, 2)


def test_a_saved_state_goes_on_bit_for_bit():
    def fn(rank, world_size):
        def train(ddp, steps):
            for step in steps:
                ddp.zero_grad()
                backward(ddp, rank, step)
            return gradients(ddp)

        def hooked(state):
            ddp = DistributedDataParallel(Awkward(), bucket_cap_mb=0.0003)
            ddp.register_comm_hook(state, quantize_hook)
            return ddp

        straight = train(hooked(QuantizationState()), range(4))
        first = QuantizationState()
        ddp = hooked(first)
        train(ddp, range(2))
        saved = first.state_dict(ddp.named_parameters())
        second = QuantizationState()
        ddp = hooked(second)
        train(ddp, range(1))  # the plan after the first backward is part of what decides the bits
        second.load_state_dict(saved, ddp.named_parameters())
        resumed = train(ddp, range(2, 4))
        assert_equal(resumed, straight)

    run_ranks(fn, 2)


def test_a_block_without_elements_is_refused():
    with pytest.raises(ValueError, match="block_size must be 1 or more, got 0"):
        QuantizationState(block_size=0)
