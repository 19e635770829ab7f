"""An optimizer over remote parameters does what it does over the same ones in one process."""

import time
import warnings
from typing import ClassVar

import pytest
import torch
from tests.rpc.workers import run_workers, worker
from tests.threads import map_in_threads
from torch import optim

from phalanx import rpc
from phalanx.optim import DistributedOptimizer
from phalanx.optim.distributed import _step_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates parts of itself that it imports
    from torch.distributed.optim.functional_adam import _FunctionalAdam

KINDS = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.01}),
    (optim.Adamax, {"lr": 0.01}),
    (optim.NAdam, {"lr": 0.01}),
    (optim.RAdam, {"lr": 0.01}),
    (optim.Adadelta, {"rho": 0.95}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.RMSprop, {"lr": 0.01, "centered": True}),
    (optim.Rprop, {"lr": 0.05}),
    (optim.ASGD, {"lr": 0.05}),
    (optim.Adafactor, {"lr": 0.01}),
    (_FunctionalAdam, {"lr": 0.01}),
]


class Layer:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.rand(3, 3, generator=generator).requires_grad_()
        self.unused = torch.rand(3, generator=generator).requires_grad_()
        self.unused.grad = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh()

    def parameters(self) -> list[rpc.RRef]:
        return [rpc.RRef(self.weight), rpc.RRef(self.unused)]

    def copy(self) -> torch.Tensor:
        return self.weight.detach().clone().requires_grad_()

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.weight.grad is None
        assert torch.equal(self.unused.grad, torch.ones(3)), ".grad is the user's"
        return self.weight.detach(), self.unused.detach()


class FailingStep(optim.SGD):
    def step(self, closure=None):
        raise KeyError("no step today")


class MyStep(optim.SGD):
    def step(self, closure=None):
        return "mine"


class FailingConstructor(optim.SGD):
    def __init__(self, *args, **kwargs):
        raise KeyError("no optimizer today")


def alone(kind, options: dict, x: torch.Tensor) -> list[torch.Tensor]:
    if kind is _FunctionalAdam:
        kind = optim.Adam
    layers = [Layer(1), Layer(2)]
    optimizer = kind([layer.weight for layer in layers], **options)
    for _ in range(3):
        optimizer.zero_grad()
        layers[1].forward(layers[0].forward(x)).sum().backward()
        optimizer.step()
    return [layer.weight.detach() for layer in layers]


def _steps(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with worker(rank, 3, folder):
        if rank:
            return
        x = torch.rand(2, 3)
        for kind, options in KINDS:
            layers = [rpc.remote(f"w{one}", Layer, (one,)) for one in (1, 2)]
            parameters = [one for layer in layers for one in layer.rpc_sync().parameters()]
            optimizer = DistributedOptimizer(kind, parameters, **options)
            for _ in range(3):
                with rpc.autograd.context() as context_id:
                    y = layers[1].rpc_sync().forward(layers[0].rpc_sync().forward(x))
                    rpc.autograd.backward(context_id, [y.sum()])
                    optimizer.step(context_id)
            for layer, expected, seed in zip(layers, alone(kind, options, x), (1, 2), strict=True):
                weight, unused = layer.rpc_sync().values()
                torch.testing.assert_close(weight, expected, msg=kind.__name__)
                assert torch.equal(unused, Layer(seed).unused)
        _others(layers, parameters, x)
        for kind in (FailingConstructor, FailingStep):
            with rpc.autograd.context() as context_id, pytest.raises(KeyError, match="today"):
                DistributedOptimizer(kind, parameters, lr=1).step(context_id)
        layers[0].rpc_sync().values()
        with pytest.raises(RuntimeError, match="Could not find autograd context"):
            optimizer.step(context_id)
        with pytest.raises(ValueError, match="empty parameter list"):
            DistributedOptimizer(optim.SGD, [], lr=1)
        with pytest.raises(TypeError, match=r"params_rref\[0\] is a Tensor, not an RRef"):
            DistributedOptimizer(optim.SGD, [torch.ones(1)], lr=1)
        _check_own_step()


def _check_own_step() -> None:
    """The short way leaves out hooks and the profiler's event: it is for those alone who have none."""
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    plain = optim.SGD([weight], lr=0.5)
    _step_of(plain)()
    assert torch.equal(weight.detach(), torch.full((2,), 0.5))
    assert _step_of(plain) != plain.step
    assert torch.is_grad_enabled()
    assert _step_of(MyStep([weight], lr=0.5))() == "mine"
    hook = plain.register_step_post_hook(lambda *_: None)
    assert _step_of(plain) == plain.step
    hook.remove()
    assert _step_of(plain) != plain.step
    with torch.autograd.profiler.profile():
        assert _step_of(plain) == plain.step
    optim.lr_scheduler.StepLR(plain, 1)  # counts steps
    assert _step_of(plain) == plain.step


def schedule(optimizer: rpc.RRef) -> optim.lr_scheduler.LRScheduler:
    return optim.lr_scheduler.StepLR(optimizer.local_value().optim, 1, gamma=0.5)


def _others(layers: list[rpc.RRef], parameters: list[rpc.RRef], x: torch.Tensor) -> None:
    """What needs more than a class: matrices alone, a schedule, a closure, groups."""
    weights = [parameters[0], parameters[2]]
    expected = [layer.rpc_sync().copy() for layer in layers]
    local = optim.Muon(expected, lr=0.1)
    schedules = [optim.lr_scheduler.StepLR(local, 1, gamma=0.5)]
    remote = DistributedOptimizer(optim.Muon, weights, lr=0.1)
    remote_schedules = [rpc.remote(one.owner(), schedule, (one,)) for one in remote.remote_optimizers]
    for one in remote_schedules:
        one.rpc_sync().get_last_lr()  # it exists: a step that came before it would not count
    for _ in range(3):
        ((x @ expected[0]).tanh() @ expected[1]).tanh().sum().backward()
        local.step()
        local.zero_grad()
        schedules[0].step()
        with rpc.autograd.context() as context_id:
            y = layers[1].rpc_sync().forward(layers[0].rpc_sync().forward(x))
            rpc.autograd.backward(context_id, [y.sum()])
            remote.step(context_id)
        for one in remote_schedules:
            one.rpc_sync().step()
    for layer, one in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer.rpc_sync().values()[0], one.detach())
    with rpc.autograd.context() as context_id, pytest.raises(TypeError, match="closure"):
        DistributedOptimizer(optim.LBFGS, weights).step(context_id)
    with pytest.raises(TypeError, match=r"params_rref\[0\] is a dict, not an RRef"):
        DistributedOptimizer(optim.SGD, [{"params": weights}], lr=1)


def test_steps_are_those_of_one_process_and_leave_grad_as_it_was():
    run_workers(_steps, 3)


def _weight() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def _total(rref: rpc.RRef) -> torch.Tensor:
    return rref.local_value().sum()


def _value(rref: rpc.RRef) -> list[float]:
    return rref.local_value().tolist()


def _partly(rank: int, folder: str) -> None:
    with worker(rank, 3, folder):
        if rank:
            return
        rrefs = [rpc.remote(to, _weight) for to in ("w0", "w1", "w2")]
        optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.5)
        expected = [1.0, 1.0, 1.0]
        for used in ([1], [0], [2, 1], [], [0, 1, 2]):
            with rpc.autograd.context() as context:
                if used:
                    totals = [rpc.rpc_sync(f"w{number}", _total, (rrefs[number],)) for number in used]
                    rpc.autograd.backward(context, [sum(totals)])
                optimizer.step(context)
            for number in used:
                expected[number] -= 0.5
            for number, rref in enumerate(rrefs):
                assert rpc.rpc_sync(f"w{number}", _value, (rref,)) == [expected[number]] * 2
        with pytest.raises(RuntimeError, match="Could not find autograd context"):
            optimizer.step(context)


def test_workers_to_which_nothing_of_the_context_has_come_keep_their_parameters():
    """A step raised there, after other workers had made theirs."""
    run_workers(_partly, 3)


class SlowSGD(optim.SGD):
    """It notes the gradients that it finds, and takes its time."""

    found: ClassVar[list[float]] = []

    def step(self, closure=None):
        self.found.append(self.param_groups[0]["params"][0].grad[0].item())
        time.sleep(0.002)
        return super().step(closure)


def _hooked_weight() -> torch.Tensor:
    weight = torch.zeros(2, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: time.sleep(0.001))
    return weight


def _times(rref: rpc.RRef, factor: float) -> torch.Tensor:
    return (rref.local_value() * factor).sum()


def _gradient(rref: rpc.RRef, context: int) -> float:
    return rpc.autograd.get_gradients(context)[rref.local_value()][0].item()


def _take_found() -> list[float]:
    return SlowSGD.found


def _two_trainers(rank: int, folder: str) -> None:
    with worker(rank, 2, folder):
        if rank:
            return
        rref = rpc.remote("w1", _hooked_weight)
        optimizer = DistributedOptimizer(SlowSGD, [rref], lr=0.0)

        def train(factor: float) -> None:
            for _ in range(40):
                with rpc.autograd.context() as context:
                    rpc.autograd.backward(context, [rpc.rpc_sync("w1", _times, (rref, factor))])
                    assert rpc.rpc_sync("w1", _gradient, (rref, context)) == factor
                    optimizer.step(context)
                    assert rpc.rpc_sync("w1", _gradient, (rref, context)) == factor

        map_in_threads(train, (1.0, 10.0))
        assert sorted(rpc.rpc_sync("w1", _take_found)) == [1.0] * 40 + [10.0] * 40


@pytest.mark.slow
def test_steps_and_passes_that_use_grad_at_once_keep_their_gradients_apart():
    """A pass through a leaf with a hook added its gradient to the one that a step of another trainer had put there."""
    run_workers(_two_trainers, 2)
