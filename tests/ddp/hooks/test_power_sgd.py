"""PowerSGD: PyTorch's numbers where PyTorch's works, and numbers where it does not."""

import pickle
import warnings

import pytest
import torch
from tests.comparisons import assert_equal
from tests.ddp.hooks.models import Awkward, backward, gradients
from torch import nn

from phalanx import DistributedDataParallel
from phalanx.ddp.hooks import PowerSGDState, fp16_compress_wrapper, powerSGD_hook
from phalanx.testing import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # this package still uses torch.jit.script
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorchs


def _net():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(128, 40), nn.Tanh(), nn.Linear(40, 12))


def _train(ddp, rank, steps):
    for step in steps:
        ddp.zero_grad()
        backward(ddp, rank, step)
    return gradients(ddp)


def _hooked(state, model=None, hook=powerSGD_hook, wrap=DistributedDataParallel, cap_mb=0.0003):
    ddp = wrap(model or Awkward(), bucket_cap_mb=cap_mb)
    ddp.register_comm_hook(state, hook)
    return ddp


@pytest.mark.parametrize(("power_rank", "feedback"), [(1, True), (2, False), (3, True)])
def test_it_gives_what_pytorchs_gives(power_rank, feedback):
    def fn(rank, world_size):
        options = {"matrix_approximation_rank": power_rank, "start_powerSGD_iter": 2, "use_error_feedback": feedback}
        theirs_state, ours_state = pytorchs.PowerSGDState(None, **options), PowerSGDState(None, **options)
        theirs = _train(_hooked(theirs_state, _net(), pytorchs.powerSGD_hook), rank, range(5))
        ours = _train(_hooked(ours_state, _net()), rank, range(5))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
        assert ours_state.compression_stats() == theirs_state.compression_stats()
        assert ours_state.iter == theirs_state.iter

    run_ranks(fn, 2)


@pytest.mark.parametrize(("backend", "world_size"), [("phalanx", 1), ("phalanx", 2), ("phalanx", 4), ("gloo", 3)])
def test_ranks_hold_the_same_bits_and_what_is_kept_adds_up(backend, world_size):
    def fn(rank, world_size):
        plain, state = DistributedDataParallel(Awkward()), PowerSGDState(None, 2, start_powerSGD_iter=2)
        power = _hooked(state)
        true = applied = 0.0
        for step in range(8):
            true = true + _train(plain, rank, [step])["module.hidden.weight"]
            left = _train(power, rank, [step])
            applied = applied + left["module.hidden.weight"]
        kept = state.state_dict(power.named_parameters())["residual"]["module.hidden.weight"]
        torch.distributed.all_reduce(kept)
        torch.testing.assert_close(applied + kept.view(41, 128) / world_size, true, rtol=1e-4, atol=1e-5)
        return left

    lefts = run_ranks(fn, world_size, backend=backend)
    for left in lefts:
        assert_equal(left, lefts[0])


@pytest.mark.slow(but=("gloo",))
def test_pytorchs_wrapper_and_pytorchs_wrapped_model_take_it(backend):
    def fn(rank, world_size):
        def train(**how):
            return _train(_hooked(PowerSGDState(None, 2, start_powerSGD_iter=2), **how), rank, range(4))

        plain = train()
        half = train(hook=fp16_compress_wrapper(powerSGD_hook))
        torch.testing.assert_close(half, plain, rtol=0.05, atol=5e-3)
        same = train(wrap=nn.parallel.DistributedDataParallel)
        torch.testing.assert_close(same, plain, rtol=1e-3, atol=1e-4)

    run_ranks(fn, 2, backend=backend)


@pytest.mark.parametrize("warm", [True, False])
def test_zero_gradients_stay_zero_and_a_nan_is_seen_once(warm):
    def fn(rank, world_size):
        model = nn.Linear(30, 20, bias=False)
        state = PowerSGDState(None, 2, start_powerSGD_iter=2, warm_start=warm)
        ddp = _hooked(state, model)
        seen = []
        for factor in (1.0, 1.0, 0.0, 1.0, float("nan") if rank else 1.0, 1.0):
            ddp.zero_grad()
            (ddp(torch.ones(1, 30)) * factor).sum().backward()
            seen.append(model.weight.grad.clone())
        return seen

    first, second, zero, whole, bad, again = run_ranks(fn, 2)[0]
    assert torch.equal(first, torch.ones(20, 30))
    assert torch.equal(second, first)
    assert torch.equal(zero, torch.zeros(20, 30))
    torch.testing.assert_close(whole, first)
    assert bad.isnan().all()
    torch.testing.assert_close(again, first)


@pytest.mark.slow
def test_a_saved_state_goes_on_bit_for_bit():
    def fn(rank, world_size):
        def state(warm):
            return PowerSGDState(None, 2, start_powerSGD_iter=2, warm_start=warm)

        for warm in (True, False):
            straight = _train(_hooked(state(warm)), rank, range(6))
            first, second = state(warm), state(warm)
            ddp = _hooked(first)
            _train(ddp, rank, range(4))
            saved = first.state_dict(ddp.named_parameters())
            ddp = _hooked(second)
            _train(ddp, rank, range(1))
            second.load_state_dict(saved, ddp.named_parameters())
            resumed = _train(ddp, rank, range(4, 6))
            assert_equal(resumed, straight)

    run_ranks(fn, 2)


def test_wrong_states_are_refused():
    with pytest.raises(ValueError, match="matrix_approximation_rank must be 1 or more, got 0"):
        PowerSGDState(None, 0)
    with pytest.raises(ValueError, match="start_powerSGD_iter must be 2 or more with error feedback"):
        PowerSGDState(None, start_powerSGD_iter=1)
    with pytest.raises(TypeError, match=r"can't be pickled.*state\.state_dict"):
        pickle.dumps(PowerSGDState(None))
    state = PowerSGDState(None)
    saved = {**state.state_dict([]), "factors": {"z": torch.zeros(1)}}
    with pytest.raises(ValueError, match="there is no parameter 'z'"):
        state.load_state_dict(saved, [])
