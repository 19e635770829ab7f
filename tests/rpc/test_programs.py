"""Backward across workers: gradients, and what hooks are told, are those of the same computation in one process."""

import random
from typing import Any

import pytest
import torch
from tests.rpc.workers import check_same, run_caller, run_workers, worker
from tests.threads import map_in_threads

from phalanx import rpc
from phalanx.rpc import autograd
from phalanx.rpc.autograd.serve import worker as autograd_worker

NAMES = ["w0", "w1", "w2"]
KINDS = ["tensor", "tensor times", "before", "before times", "before none", "after", "after empty", "removed"]


class NoGradient(torch.autograd.Function):
    """Its input has a gradient of None, or of nothing but zeros if it is materialised."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return None


class Leaf:
    """A tensor of a worker with hooks, and their calls in order."""

    def __init__(self, kinds: list[str], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.value = torch.rand(2, 3, generator=generator, dtype=torch.float64).requires_grad_()
        self.node: Any = self.value.expand_as(self.value).grad_fn.next_functions[0][0]
        self.calls: list[Any] = []
        for number, kind in enumerate(kinds):
            self.register(f"{number} {kind}", kind)

    def register(self, name: str, kind: str) -> None:
        def hear(result: Any, *args: Any) -> Any:
            # copies: the next pass in one process adds to them in place
            self.calls.append((name, *(None if one is None else one.clone() for one in args)))
            return result

        value, node = self.value, self.node
        if kind == "tensor":
            value.register_hook(lambda g: hear(None, g))
        elif kind == "tensor times":  # a hook that is not linear counts how often it runs
            value.register_hook(lambda g: hear(None if g is None else (g * 3).clamp(max=2.0), g))
        elif kind == "before":
            node.register_prehook(lambda g: hear(None, *g))
        elif kind == "before times":
            node.register_prehook(lambda g: hear(None if g[0] is None else (g[0] * 2,), *g))
        elif kind == "before none":
            node.register_prehook(lambda g: hear((None,), *g))
        elif kind == "after":
            node.register_hook(lambda _, g: hear(None, *g))
        elif kind == "after empty":
            node.register_hook(lambda out, g: hear((), *out, *g))
        else:
            node.register_hook(lambda _, g: hear(None, *g)).remove()
            node.register_prehook(lambda g: hear(None, *g)).remove()


_leaves: dict[Any, list[Leaf]] = {}  # by run and worker
_between: dict[Any, list[Any]] = {}  # what hooks of results have heard


def make_leaves(run: str, rank: int, kinds: list[list[str]], seed: int) -> None:
    _leaves[run, rank] = [Leaf(one, seed + 10 * rank + number) for number, one in enumerate(kinds)]
    _between[run, rank] = []


def take_calls(run: str, rank: int) -> list[Any]:
    return [*(leaf.calls for leaf in _leaves[run, rank]), sorted(_between[run, rank], key=lambda call: call[0])]


# A program is data: steps that take some of the earlier values and give one to three new ones, not all of which are
# used by a later one. A step may run on another worker (by rpc_sync, rpc_async or remote), use leaves of that worker,
# and call a program of its own there. A call passes all that it may use, and uses a part.


def make_program(rng: random.Random, num_inputs: int, depth: int) -> list[tuple]:
    program, num_known = [], num_inputs
    for _ in range(rng.randint(1, 5)):
        arguments = [rng.randrange(num_known) for _ in range(rng.randint(1, 4))]
        where, gives = rng.choice([None, None, 0, 1, 2]), rng.randint(1, 3)
        if depth and where is not None and rng.random() < 0.6:
            step: Any = ("call", make_program(rng, len(arguments), depth - 1))
        else:
            ops = ["mul", "leaf", "leaf", "none", "no gradient", "cut", "sin", "two"]
            step = ("op", [(rng.choice(ops), rng.randrange(len(arguments)), rng.randrange(3)) for _ in range(gives)])
        program.append((where, rng.choice(["sync", "async", "remote"]), step, arguments, gives, rng.randrange(1 << 30)))
        num_known += gives
    return program


def apply(op: str, x: torch.Tensor, inputs: list[torch.Tensor], leaf: torch.Tensor) -> torch.Tensor:
    if op == "leaf":
        return (x * leaf).tanh()
    if op == "none":
        return x + NoGradient.apply(leaf) + NoGradient.apply(x)
    if op == "no gradient":
        return NoGradient.apply(x)
    if op == "cut":
        return x.detach() * 0.5 + sum(inputs[1:], torch.zeros_like(x))
    if op == "sin":
        return x.sin()
    if op == "two":
        halves = x.split(1)
        return torch.cat([halves[1], halves[0] * 2]) * inputs[-1]
    return x * inputs[0] * 0.5


def run_op(run: str, rank: int, operations: list[tuple], gives: int, tag: int, inputs: list[torch.Tensor]) -> Any:
    results = []
    for number, (op, which, leaf) in enumerate(operations):
        x = apply(op, inputs[which], inputs, _leaves[run, rank][leaf].value)
        if x.requires_grad:
            x.register_hook(lambda g, name=f"{tag} {number}": _between[run, rank].append((name, g)))
        results.append(x)
    return results


def run_program(run: str, rank: int, program: list[tuple], gives: int, tag: int, inputs: list[torch.Tensor]) -> Any:
    known = list(inputs)
    for where, how, (kind, body), arguments, its_gives, its_tag in program:
        at = rank if where is None else where
        fn = run_program if kind == "call" else run_op
        args = (run, at, body, its_gives, its_tag, [known[one] for one in arguments])
        if where is None or run.startswith("alone"):
            known += fn(*args)
        elif how == "sync":
            known += rpc.rpc_sync(NAMES[at], fn, args)
        elif how == "async":
            known += rpc.rpc_async(NAMES[at], fn, args).wait()
        else:
            known += rpc.remote(NAMES[at], fn, args).to_here()
    return known[-gives:]


def gradients_of(run: str, rank: int, context_id: int) -> list[Any]:
    assert all(leaf.value.grad is None for leaf in _leaves[run, rank])
    found = autograd.get_gradients(context_id)
    return [found.get(leaf.value) for leaf in _leaves[run, rank]]


def compare(seed: int, rank: int) -> tuple[bool, set[str]]:
    """Return whether the program sent something, and which hooks were called."""
    rng = random.Random(seed)
    program, num_passes = make_program(rng, 3, 2), rng.randint(1, 2)
    kinds = [[rng.sample(KINDS, rng.randint(0, 5)) for _ in range(3)] for _ in NAMES]
    alone, run = f"alone {seed}", f"run {seed}"

    def loss_of(run: str) -> torch.Tensor:
        inputs = [leaf.value for leaf in _leaves[run, rank]]
        return sum(run_program(run, rank, program, 2, 0, inputs)).sum()

    for one, name in enumerate(NAMES):
        make_leaves(alone, one, kinds[one], seed)
        rpc.rpc_sync(name, make_leaves, (run, one, kinds[one], seed))
    loss = loss_of(alone)
    if not loss.requires_grad:
        return False, set()
    for number in range(num_passes):
        loss.backward(retain_graph=number + 1 < num_passes)
    expected = [leaf.value.grad for one in range(3) for leaf in _leaves[alone, one]]
    with autograd.context() as context_id:
        across = loss_of(run)
        assert torch.equal(across, loss)
        for number in range(num_passes):
            autograd.backward(context_id, [across], retain_graph=number + 1 < num_passes)
        has_sent = bool(autograd_worker().contexts.find(context_id).sends)
        assert not autograd_worker().contexts.find(context_id).passes
        args = [(name, (run, one, context_id)) for one, name in enumerate(NAMES)]
        found = [gradient for name, arg in args for gradient in rpc.rpc_sync(name, gradients_of, arg)]
    check_same(found, expected, seed, "gradients")
    calls = [rpc.rpc_sync(name, take_calls, (run, one)) for one, name in enumerate(NAMES)]
    check_same(calls, [take_calls(alone, one) for one in range(3)], seed, "calls")
    return has_sent, {call[0].partition(" ")[2] for of_worker in calls for leaf in of_worker[:3] for call in leaf}


def _compare(rank: int, folder: str, seed: int, count: int) -> None:
    with worker(rank, 3, folder):
        # All three at once, and two threads of the first: contexts are apart.
        def run(seed: int) -> None:
            sent, called = zip(*(compare(seed + number, rank) for number in range(count)), strict=True)
            assert sum(sent) > count // 3
            assert set().union(*called) == set(KINDS) - {"removed"}

        map_in_threads(run, [seed + 1000 * (2 * rank + one) for one in range(2 - (rank > 0))])


@pytest.mark.slow
def test_gradients_and_hooks_of_generated_programs_are_those_of_one_process():
    """Hooks of the nodes that add to `.grad` were never called: nothing here adds to `.grad`. Hooks of a tensor that
    another worker was given and did not use were called with None."""
    run_workers(_compare, 3, 7000, 40)


def pick(numbers: list[int], tensors: list[torch.Tensor]) -> torch.Tensor:
    return sum((tensors[one] * (one + 1) for one in numbers), torch.zeros(2, dtype=torch.float64))


def _many() -> None:
    """More tensors than there are bits in a word, of which few are used."""
    heard: list[int] = []
    tensors = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(100)]
    for number, one in enumerate(tensors):
        one.register_hook(lambda _, number=number: heard.append(number))
    for used in ([70, 99], [0], [62, 63, 64], list(range(100))):
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("w1", pick, (used, tensors)).sum()])
            found = autograd.get_gradients(context_id)
            assert sorted(heard) == used
            assert [number for number, one in enumerate(tensors) if one in found] == used
            assert all(torch.equal(found[tensors[one]], torch.full((2,), one + 1.0).double()) for one in used)
        heard.clear()


def test_of_a_hundred_tensors_those_that_are_used_have_gradients():
    run_caller(_many, 3)
