"""Gradients whose memory is also somebody else's: theirs stays what it was, and ours is right.

The story is told in tests/parity/test_random_models.py, whose random models found what is here by name; kept small
gradients were overwritten by the next backward, and so was what a hook had kept of a large one.
"""

import functools
import threading

import pytest
import torch
from tests.comparisons import assert_equal
from tests.ddp.models import mean_gradients, wide_model
from tests.on_ranks import on_ranks
from tests.small_models import batch_of
from tests.training import copy_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx import DistributedDataParallel
from phalanx.ddp.exchange import WorkExchange
from phalanx.testing import run_ranks

_WIDTH = 256  # of a matrix of 256 KiB, whose gradient autograd writes where all ranks read it


_build = functools.partial(wide_model, _WIDTH)
_batch = functools.partial(batch_of, shape=(4, _WIDTH))


def _step(ddp, rank, step):
    ddp(_batch(rank, step)).square().mean().backward()


def _mean(world_size, step):
    return mean_gradients(_build(), [_batch(rank, step) for rank in range(world_size)])


@on_ranks(2)
def test_kept_gradients_stay_and_others_go_on(rank, world_size, backend):
    """In turn: the gradients themselves, views of them, one of each bucket; of one step, and of many."""
    whats = (lambda g: g, lambda g: g[0], lambda g: g.detach(), lambda g: g.numpy())
    for keep in (lambda step: step == 1, lambda step: True, lambda step: step % 2 == 0):
        ddp = DistributedDataParallel(_build())
        kept = []
        for step in range(6):
            ddp.zero_grad()
            _step(ddp, rank, step)
            torch.testing.assert_close([p.grad for p in ddp.parameters()], _mean(world_size, step))
            for number, p in enumerate(ddp.parameters()):
                if keep(step) and (number + step) % 3:
                    one = whats[(number + step) % len(whats)](p.grad)
                    kept.append((one, torch.as_tensor(one).clone()))
            assert all(torch.equal(torch.as_tensor(one), before) for one, before in kept)


class _ThroughNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.from_numpy(grad.numpy())  # the same memory, in a storage that counts for itself


@on_ranks(2)
def test_a_gradient_that_came_back_from_numpy_is_not_taken_for_ours_alone(rank, world_size):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = (nn.Parameter(torch.randn(_WIDTH, _WIDTH) * 0.1) for _ in range(3))

        def forward(self, x):
            return _ThroughNumpy.apply(x @ self.a, self.b) @ self.c

    x = [batch_of(r, shape=(_WIDTH, _WIDTH)) for r in range(world_size)]
    ddp = DistributedDataParallel(Model())
    ddp(x[rank]).square().mean().backward()
    torch.testing.assert_close([p.grad for p in ddp.parameters()], mean_gradients(Model(), x))


@on_ranks(2)
def test_a_wrapper_that_refused_a_backward_takes_the_next(rank, world_size):
    ddp = DistributedDataParallel(_build())
    with pytest.raises(RuntimeError, match="create_graph=True"):
        ddp(_batch(rank, 0)).square().mean().backward(create_graph=True)
    ddp.zero_grad()
    _step(ddp, rank, 1)
    torch.testing.assert_close([p.grad for p in ddp.parameters()], _mean(world_size, 1))


@on_ranks(2)
def test_gradients_lie_in_the_bucket_again_when_what_was_kept_is_let_go(rank):
    ddp = DistributedDataParallel(_build())
    bias = ddp.module[0].bias
    places = []
    kept = None
    for step in range(6):
        ddp.zero_grad()
        _step(ddp, rank, step)
        places.append(bias.grad.data_ptr())
        kept = bias.grad if step in (1, 2, 3) else None
    assert kept is None
    first, again = places[1], places[2:]
    assert again[0] != first  # the one that was kept
    assert again[3] in (first, again[0])


@on_ranks(2)
def test_gradients_that_are_zeroed_in_place_stay_the_same_tensors_whoever_holds_them(rank, world_size, backend):
    ddp = DistributedDataParallel(_build())
    ddp.zero_grad()
    _step(ddp, rank, 0)
    grads = [p.grad for p in ddp.parameters()]
    flat = grads[0].view(-1)
    for step in range(1, 4):
        ddp.zero_grad(set_to_none=False)
        _step(ddp, rank, step)
        assert all(p.grad is grad for p, grad in zip(ddp.parameters(), grads, strict=True))
        torch.testing.assert_close(grads, _mean(world_size, step))
        assert torch.equal(flat, grads[0].view(-1))


@on_ranks(2)
def test_a_gradient_that_is_ours_alone_is_not_copied(rank):
    ddp = DistributedDataParallel(_build())
    places = {}
    for number in (0, 2):
        weight = ddp.module[number].weight
        weight.register_hook(lambda grad, number=number: places.update({number: grad.data_ptr()}))
    for step in range(4):
        ddp.zero_grad()
        _step(ddp, rank, step)
        assert places == {number: ddp.module[number].weight.grad.data_ptr() for number in (0, 2)}


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@on_ranks(3)
def test_a_hook_that_comes_after_ours_sees_this_ranks_gradient(rank, backend):
    """It saw a mixture: the other ranks wrote their part of the mean while it read."""
    ddp = DistributedDataParallel(_build(), bucket_cap_mb=0.0001)
    seen = {}
    for name, parameter in ddp.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    for step in range(4):
        ddp.zero_grad()
        _step(ddp, rank, step)
        alone = _build()
        alone(_batch(rank, step)).square().mean().backward()
        assert all(torch.equal(seen[name], p.grad) for name, p in alone.named_parameters())


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@on_ranks(2)
def test_what_a_hook_that_comes_after_ours_makes_of_a_gradient_is_what_is_averaged(rank, world_size, backend):
    """A bucket whose gradients are copied leaves at the gradient that completes it, if no hook comes after ours."""

    def scale(parameter):
        parameter.grad.mul_(rank + 1.0)

    ddp = DistributedDataParallel(_build(), bucket_cap_mb=0.0001)
    for step in range(4):
        hooks = [
            parameter.register_post_accumulate_grad_hook(scale) for parameter in ddp.module.parameters() if step != 2
        ]
        ddp.zero_grad()
        _step(ddp, rank, step)
        expected = []
        for other in range(world_size):
            alone = _build()
            alone(_batch(other, step)).square().mean().backward()
            factor = 1.0 if step == 2 else other + 1.0
            expected.append([p.grad * factor / world_size for p in alone.parameters()])
        mean = [sum(gradients) for gradients in zip(*expected, strict=True)]
        torch.testing.assert_close([p.grad for p in ddp.parameters()], mean)
        for hook in hooks:
            hook.remove()


@on_ranks(2, backend="gloo")
def test_a_copied_bucket_leaves_before_the_next_gradient_is_there(rank, monkeypatch):
    """It waited for the next gradient, and between hosts nothing was on the link meanwhile."""
    events = []
    launch = WorkExchange.launch
    monkeypatch.setattr(WorkExchange, "launch", lambda self, bucket: events.append("launch") or launch(self, bucket))
    model = nn.Sequential(nn.Linear(_WIDTH, 8, bias=False), nn.Linear(8, 8, bias=False))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    ddp.module[0].weight.register_hook(lambda _: events.append("next gradient"))
    _step(ddp, rank, 0)
    assert events == ["launch", "next gradient", "launch"]


def _watch(model, kept):
    """Let hooks of every kind keep what they are given, and note what it holds. Returns what must be held meanwhile."""

    def keep(grad):
        kept.append((grad, grad.clone()))

    nodes = []
    for parameter in model.parameters():
        parameter.register_hook(keep)
        parameter.register_post_accumulate_grad_hook(lambda p: keep(p.grad))
        nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda _, grads: keep(grads[0]))
    for layer in list(model)[1:]:
        layer.register_full_backward_hook(lambda _m, _i, grads: keep(grads[0]))
    return nodes


@pytest.mark.slow(but=("phalanx",))
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@on_ranks(2)
def test_what_hooks_keep_of_a_gradient_stays_what_autograd_made(rank, world_size, backend):
    for before in (True, False):
        model, kept, nodes = _build(), [], []
        if before:
            nodes += _watch(model, kept)
        ddp = DistributedDataParallel(model)
        if not before:
            nodes += _watch(model, kept)
        for step in range(4):
            ddp.zero_grad()
            _step(ddp, rank, step)
            torch.testing.assert_close([p.grad for p in ddp.parameters()], _mean(world_size, step))
        assert all(torch.equal(grad, was) for grad, was in kept)


class _Added(nn.Module):
    """Two parameters whose gradients are one view each of what flows on upstream."""

    def __init__(self, size):
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Parameter(torch.randn(size, size))
        self.one, self.other = (nn.Parameter(torch.randn(size, size)) for _ in range(2))

    def forward(self, x):
        return torch.tanh(x * self.below) + self.one.unsqueeze(0) + self.other.unsqueeze(0)


@pytest.mark.parametrize("size", [8, _WIDTH])
@on_ranks(2)
def test_micro_batches_add_to_gradients_that_share_no_memory(rank, size):
    """In torch itself, without a wrapper, `one` and `other` share their first gradient, and what the second backward
    adds to one is added to the other: 3 times the gradient after two backwards, in place of 2."""
    model = _Added(size)
    ddp = DistributedDataParallel(model)
    x = torch.full((1, size, size), 1.0 + rank)
    for _ in range(2):
        ddp.zero_grad()
        for micro in range(3):
            ddp.require_backward_grad_sync = micro == 2
            ddp(x).sum().backward()
        ones = torch.full((size, size), 3.0)
        assert torch.equal(model.one.grad, ones)
        assert torch.equal(model.other.grad, ones)
        expected = sum(3 * r * (1 - torch.tanh(r * model.below.detach()) ** 2) for r in (1, 2)) / 2
        torch.testing.assert_close(model.below.grad, expected)


@on_ranks(2)
def test_backwards_in_other_threads_get_the_mean(rank):
    """A backward in a thread of the user's, with backwards inside it. (Of 60 and more torch itself dies there.)"""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = _Added(_WIDTH)

        def forward(self, x, depth=5):
            if depth:
                return checkpoint(self.forward, x, depth - 1, use_reentrant=True)
            return self.model(x)

    torch.manual_seed(0)
    for deep in (False, True):
        ddp = DistributedDataParallel(Deep() if deep else _Added(_WIDTH), find_unused_parameters=False)
        below = next(ddp.parameters())
        x = torch.full((1, _WIDTH, _WIDTH), 1.0 + rank, requires_grad=True)
        for _ in range(2):
            ddp.zero_grad()
            loss = ddp(x).sum()
            thread = threading.Thread(target=loss.backward, name="user")
            thread.start()
            thread.join()
            expected = sum(r * (1 - torch.tanh(r * below.detach()) ** 2) for r in (1, 2)) / 2
            torch.testing.assert_close(below.grad, expected)
            assert all(torch.equal(p.grad, torch.ones(_WIDTH, _WIDTH)) for p in list(ddp.parameters())[1:])


def _penalty(model):
    return 0.1 * sum(p.square().sum() for p in list(model.parameters())[:3])


def test_a_backward_past_the_wrapper_adds_to_the_mean_as_in_pytorch(backend):
    """`loss.backward(); penalty.backward()`: the second reaches some parameters only, and the next forward raised."""

    def train(ddp, rank, results):
        for step in range(3):
            ddp.zero_grad()
            _step(ddp, rank, step)
            _penalty(ddp.module).backward()
            results.append(copy_gradients(ddp))
            with torch.no_grad():
                for p in ddp.parameters():
                    p.sub_(0.1 * p.grad)

    def fn(rank, world_size):
        ours, theirs = [], []
        train(DistributedDataParallel(_build()), rank, ours)
        train(nn.parallel.DistributedDataParallel(_build()), rank, theirs)
        assert_equal(ours, theirs)

    run_ranks(fn, 2, backend=backend)


@on_ranks(2)
def test_outputs_that_hide_their_tensors_get_the_mean_in_every_backward(rank, world_size):
    """Also after `no_sync`, after which every such backward stayed on its rank."""

    class Hidden:
        def __init__(self, tensor):
            self.tensor = tensor

    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = _build()

        def forward(self, x):
            return Hidden(self.inner(x))

    ddp = DistributedDataParallel(Hides())
    with ddp.no_sync():
        ddp(_batch(rank, 0)).tensor.square().mean().backward()
    for step in range(3):
        ddp.zero_grad()
        ddp(_batch(rank, step)).tensor.square().mean().backward()
        torch.testing.assert_close([p.grad for p in ddp.parameters()], _mean(world_size, step))
    ddp.zero_grad()
    losses = [ddp(_batch(rank, step)).tensor.square().mean() for step in (0, 1)]
    for loss in losses:
        loss.backward()
    expected = [a + b for a, b in zip(_mean(world_size, 0), _mean(world_size, 1), strict=True)]
    torch.testing.assert_close([p.grad for p in ddp.parameters()], expected)
