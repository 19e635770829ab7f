"""Hooks of leaves in a backward pass across workers, one thing at a time; `test_programs` has the rest."""

from typing import Any

import pytest
import torch
from tests.rpc.workers import run_caller
from tests.threads import map_in_threads

from phalanx import rpc
from phalanx.rpc import autograd
from phalanx.rpc.autograd.serve import worker as autograd_worker


class Leaf:
    """A tensor of this worker with hooks, and their calls in order."""

    def __init__(self, kinds: list[str]) -> None:
        self.value = torch.rand(2, 3, dtype=torch.float64).requires_grad_()
        self.node: Any = self.value.expand_as(self.value).grad_fn.next_functions[0][0]
        self.calls: list[Any] = []
        for kind in kinds:
            if kind == "raise":
                self.node.register_hook(self.fail)
            elif kind == "wrong":
                self.node.register_prehook(lambda g: [g[0]] if self.calls.append(g) is None else None)
            else:
                self.node.register_hook(lambda _, g: self.calls.append(g))

    def fail(self, *args: Any) -> None:
        self.calls.append(args)
        raise KeyError("a hook of mine")


_leaves: list[Leaf] = []


def make_leaves(kinds: list[str]) -> None:
    _leaves[:] = [Leaf(kinds)]


def num_calls() -> int:
    return len(_leaves[0].calls)


def go(x: torch.Tensor, then: str | None) -> torch.Tensor:
    y = x * _leaves[0].value
    return y if then is None else rpc.rpc_sync(then, go, (y, None))


def _raises() -> None:
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    for number, (kind, text) in enumerate(
        [("raise", "KeyError was raised on worker 'w2'"), ("wrong", "expected tuple, but hook returned 'list'")] * 3
    ):
        rpc.rpc_sync("w2", make_leaves, ([kind, "after"],))
        rpc.rpc_sync("w1", make_leaves, (["after"],))
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("w1", go, (x, "w2")).sum()
            with pytest.raises(autograd.BackwardError, match=rf"(?s)Error on Node 2: .*{text}"):
                autograd.backward(context_id, [loss], retain_graph=bool(number % 2))
            assert rpc.rpc_sync("w2", num_calls) == 1


def test_a_hook_that_raises_on_another_worker_ends_the_pass_with_its_error():
    run_caller(_raises, 3)


def triple_gradient(x: torch.Tensor, way: str) -> torch.Tensor:
    """Return `x` doubled, with the gradient of `x` on its way back tripled in one of the ways that there are."""
    node: Any = x.grad_fn
    if way == "before":
        node.register_prehook(lambda gradients: (gradients[0] * 3,))
    elif way == "after":
        heard: list[torch.Tensor] = []
        node.register_hook(lambda _, gradients: heard.append(gradients[0]))
        x.register_hook(lambda gradient: gradient * 3)
        _heard.append(heard)
    elif way == "removed":
        node.register_prehook(lambda gradients: (gradients[0] * 5,)).remove()
        x.register_hook(lambda gradient: gradient * 3)
    return x * 2


_heard: list[list[torch.Tensor]] = []


def take_heard() -> list[int]:
    counts = [len(one) for one in _heard]
    _heard.clear()
    return counts


def _hooks_of_arrived() -> None:
    for way in ("before", "after", "removed"):
        for _ in range(40):  # a pass takes a shorter way once passes have been short
            with autograd.context() as context_id:
                x = torch.ones(3, requires_grad=True)
                y = rpc.rpc_sync("w1", triple_gradient, (x, way))
                autograd.backward(context_id, [y.sum()])
                assert autograd.get_gradients(context_id)[x].tolist() == [6.0] * 3, way
    assert rpc.rpc_sync("w1", take_heard) == [1] * 40


def test_hooks_of_the_node_of_a_tensor_that_arrived_are_called_in_every_pass():
    """They were called in passes that took long, and not in short ones, where the engine does not run that node."""
    run_caller(_hooks_of_arrived, 2)


def scale(factor: float, x: torch.Tensor) -> torch.Tensor:
    return x * factor * _leaves[0].value


def listen_for_contexts() -> None:
    """Note which context each call of a hook is inside of, and what has gathered there before and after."""
    make_leaves([])
    before: dict[int, bool] = {}

    def gathered() -> tuple[int, Any]:
        context = autograd_worker().contexts.current
        assert context is not None
        return context.id, context.gradients.get(_leaves[0].value)

    def after(_: Any, gradients: Any) -> None:
        context_id, found = gathered()
        _leaves[0].calls.append((context_id, before[context_id], gradients[0].clone(), found.clone()))

    _leaves[0].node.register_prehook(lambda _: before.update([(gathered()[0], gathered()[1] is None)]))
    _leaves[0].node.register_hook(after)


def calls_heard() -> list[Any]:
    return _leaves[0].calls


def _at_once() -> None:
    rpc.rpc_sync("w1", listen_for_contexts)
    totals: dict[int, torch.Tensor] = {}

    def run(factor: float) -> None:
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        for _ in range(15):
            with autograd.context() as context_id:
                autograd.backward(context_id, [rpc.rpc_sync("w1", scale, (factor, x)).sum()])
                totals[context_id] = torch.full((2, 3), factor, dtype=torch.float64)

    map_in_threads(run, (1.0, 2.0, 3.0, 4.0))
    calls = rpc.rpc_sync("w1", calls_heard)
    assert len(calls) == len(totals) == 60
    for context_id, nothing_before, gradient, gathered in calls:
        assert nothing_before
        assert torch.equal(gradient, totals[context_id])
        assert torch.equal(gathered, totals[context_id])


def test_hooks_of_passes_that_run_at_once_each_see_their_own_context():
    run_caller(_at_once, 3)


class RunsEngine(torch.autograd.Function):
    """Backward, another run of the engine comes to a leaf of this worker, inside of the pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            _leaves[0].value.sin().sum().backward()
        return gradient


def runs_engine(x: torch.Tensor) -> torch.Tensor:
    return RunsEngine.apply(x * _leaves[0].value)


def _inside() -> Any:
    rpc.rpc_sync("w1", make_leaves, (["after"],))
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("w1", runs_engine, (x,)).sum()])
        leaf, grad, gathered, calls = rpc.rpc_sync("w1", what_came, (context_id,))
    assert torch.equal(gathered, torch.ones_like(leaf))
    assert torch.equal(grad, leaf.cos())
    assert len(calls) == 2  # the node's hook, of either run


def what_came(context_id: int) -> Any:
    leaf = _leaves[0]
    return leaf.value.detach(), leaf.value.grad, autograd.get_gradients(context_id)[leaf.value], leaf.calls


def test_a_backward_inside_of_a_pass_does_not_gather_in_the_context():
    run_caller(_inside, 3)


# -- hooks that find the gradient in .grad -----------------------------------------------------------------------------

_crossed = torch.full((3,), 2.0, requires_grad=True)
_seen: list[Any] = []


def listen_to_grad(kind: str) -> None:
    _crossed.grad = torch.full((3,), 100.0)

    def hook(leaf: torch.Tensor) -> None:
        assert leaf is _crossed
        assert leaf.grad is not None
        _seen.append(leaf.grad.tolist())
        if kind == "change":
            leaf.grad.mul_(10)
        elif kind == "take":
            leaf.grad = None

    _crossed.register_post_accumulate_grad_hook(hook)


def seen_and_kept(context_id: int) -> Any:
    found = autograd.get_gradients(context_id).get(_crossed)
    seen, _seen[:] = list(_seen), []
    assert _crossed.grad is not None
    return seen, None if found is None else found.tolist(), _crossed.grad.tolist()


def times_crossed(x: torch.Tensor) -> torch.Tensor:
    return x * _crossed


def cross(x: torch.Tensor, to: str) -> torch.Tensor:
    return rpc.rpc_sync(to, times_crossed, (x * _crossed,)) * _crossed


def _find_grad() -> None:
    for kind, kept in (("change", [150.0] * 3), ("take", None)):
        rpc.rpc_sync("w1", listen_to_grad, (kind,))
        for _ in range(20):
            with autograd.context() as context_id:
                x = torch.full((3,), 5.0, requires_grad=True)
                y = rpc.rpc_sync("w1", times_crossed, (x,))
                autograd.backward(context_id, [(y * 3).sum()])
                seen, found, before = rpc.rpc_sync("w1", seen_and_kept, (context_id,))
                assert autograd.get_gradients(context_id)[x].tolist() == [6.0] * 3
                assert before == [100.0] * 3
                assert found == kept
                assert seen[0] == [15.0] * 3


def test_hooks_find_this_passs_gradient_in_grad_and_what_they_leave_there_counts():
    run_caller(_find_grad, 2)


def _cross() -> None:
    for to in ("w1", "w2"):
        rpc.rpc_sync(to, listen_to_grad, ("look",))

    def train(way: tuple[str, str]) -> None:
        for _ in range(40):
            with autograd.context() as context_id:
                x = torch.full((3,), 5.0, requires_grad=True)
                autograd.backward(context_id, [rpc.rpc_sync(way[0], cross, (x, way[1])).sum()])
                assert autograd.get_gradients(context_id)[x].tolist() == [8.0] * 3

    map_in_threads(train, (("w1", "w2"), ("w2", "w1")))


def test_passes_whose_ways_cross_do_not_keep_each_other_from_grad():
    """Each held the lock on `.grad` of one worker as it waited for gradients of the other: both hung."""
    run_caller(_cross, 3)
