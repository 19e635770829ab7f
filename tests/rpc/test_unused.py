"""Tensors that are passed on and not used are no part of a backward: hooks are called as in one process."""

import random
from typing import Any

import pytest
import torch
from tests.rpc.workers import check_same, run_workers, worker

from phalanx import rpc
from phalanx.rpc import autograd
from phalanx.rpc.autograd.serve import worker as autograd_worker

NAMES = ["w0", "w1", "w2"]
_alone = False  # whether all three workers are this process
_here = 0


class NoGradient(torch.autograd.Function):
    """Its input has a gradient of None, or of nothing but zeros if it is materialised."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return None


class Leaf:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.value = torch.rand(2, generator=generator, dtype=torch.float64).requires_grad_()
        self.node = self.value.expand_as(self.value).grad_fn.next_functions[0][0]
        self.calls: list[Any] = []
        self.value.register_hook(lambda g: self.calls.append(("tensor", g)))
        self.node.register_prehook(lambda g: self.calls.append(("before", *g)))
        self.node.register_hook(lambda _, g: self.calls.append(("after", *g)))


_leaves: dict[int, list[Leaf]] = {}  # by worker
_between: dict[int, list[Any]] = {}  # what hooks of results have heard


def make_leaves(rank: int, seed: int) -> None:
    _leaves[rank] = [Leaf(seed + 10 * rank + one) for one in range(3)]
    _between[rank] = []


def take_calls(rank: int) -> list[Any]:
    found = [*(leaf.calls[:] for leaf in _leaves[rank]), sorted(_between[rank], key=lambda call: call[0])]
    for leaf in _leaves[rank]:
        leaf.calls.clear()
    _between[rank].clear()
    return found


# A program is data: steps that take some of the earlier values and give one to three new ones, not all of which are
# used by a later one. A call passes all that it may use, and uses a part.


def make_program(rng: random.Random, num_inputs: int, depth: int) -> list[tuple]:
    program, num_known = [], num_inputs
    for _ in range(rng.randint(1, 4)):
        arguments = [rng.randrange(num_known) for _ in range(rng.randint(1, 4))]
        where = rng.choice([None, 0, 1, 2])
        if depth and where is not None and rng.random() < 0.6:
            body = make_program(rng, len(arguments), depth - 1)
            step: Any = ("call", body)
            gives = rng.randint(1, 3)
        else:
            gives = rng.randint(1, 3)
            used = [rng.randrange(len(arguments)) for _ in range(gives)]
            step = ("op", [(rng.choice(["mul", "leaf", "none", "cut", "sin"]), one, rng.randrange(3)) for one in used])
        program.append((where, step, arguments, gives, rng.randrange(1 << 30)))
        num_known += gives
    return program


def run_op(rank: int, operations: list[tuple], gives: int, tag: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    results = []
    for number, (op, which, leaf) in enumerate(operations):
        x = inputs[which]
        if op == "leaf":
            x = x * _leaves[rank][leaf].value
        elif op == "none":
            x = x + NoGradient.apply(_leaves[rank][leaf].value) + NoGradient.apply(x)
        elif op == "cut":
            x = NoGradient.apply(x)
        elif op == "sin":
            x = x.sin()
        else:
            x = x * 0.5
        x.register_hook(lambda g, name=f"{tag} {number}": _between[rank].append((name, g)))
        results.append(x)
    return results


def run_program(
    rank: int, program: list[tuple], gives: int, tag: int, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    known = list(inputs)
    for where, (kind, body), arguments, its_gives, its_tag in program:
        args = [known[one] for one in arguments]
        fn = run_program if kind == "call" else run_op
        at = rank if where is None else where
        if _alone or where is None:
            known += fn(at, body, its_gives, its_tag, args)
        else:
            known += rpc.rpc_sync(NAMES[at], fn, (at, body, its_gives, its_tag, args))
    return known[-gives:]


def gradients_of(rank: int, context_id: int) -> list[Any]:
    found = autograd.get_gradients(context_id)
    return [found.get(leaf.value) for leaf in _leaves[rank]]


def make_all(rng: random.Random) -> tuple[int, list[tuple], int]:
    return rng.randrange(1000), make_program(rng, 3, 2), rng.randint(1, 2)


def run_alone(rng: random.Random, rank: int) -> Any:
    global _alone
    seed, program, num_passes = make_all(rng)
    _alone = True
    for one in range(3):
        make_leaves(one, seed)
    loss = run_program(rank, program, 1, 0, [leaf.value for leaf in _leaves[rank]])[0].sum()
    for number in range(num_passes):
        loss.backward(retain_graph=number + 1 < num_passes)
    _alone = False
    gradients = [leaf.value.grad for one in range(3) for leaf in _leaves[one]]
    return gradients, [take_calls(one) for one in range(3)]


def run_remotely(rng: random.Random, rank: int) -> tuple[Any, int]:
    seed, program, num_passes = make_all(rng)
    for one, name in enumerate(NAMES):
        rpc.rpc_sync(name, make_leaves, (one, seed))
    with autograd.context() as context_id:
        loss = run_program(rank, program, 1, 0, [leaf.value for leaf in _leaves[rank]])[0].sum()
        for number in range(num_passes):
            autograd.backward(context_id, [loss], retain_graph=number + 1 < num_passes)
        num_sent = len(autograd_worker().contexts.find(context_id).sends)
        gradients = [g for one, name in enumerate(NAMES) for g in rpc.rpc_sync(name, gradients_of, (one, context_id))]
        assert not autograd_worker().contexts.find(context_id).passes
    return (gradients, [rpc.rpc_sync(name, take_calls, (one,)) for one, name in enumerate(NAMES)]), num_sent


def _compare(rank: int, folder: str, seed: int, count: int) -> None:
    torch.set_num_threads(1)
    with worker(rank, 3, folder):
        if rank:
            return
        num_sent = 0
        for number in range(count):
            expected = run_alone(random.Random(seed + number), rank)
            found, sent = run_remotely(random.Random(seed + number), rank)
            num_sent += bool(sent)
            check_same(found, expected, seed + number)
        assert num_sent > count // 2


@pytest.mark.slow
def test_hooks_and_gradients_are_those_of_one_process_where_tensors_are_not_used():
    """Hooks of a tensor that another worker was given and did not use were called with None."""
    run_workers(_compare, 3, 7000, 150, timeout=100)


def pick(numbers: list[int], tensors: list[torch.Tensor]) -> torch.Tensor:
    return sum((tensors[one] * (one + 1) for one in numbers), torch.zeros(2, dtype=torch.float64))


def _many(rank: int, folder: str) -> None:
    """More tensors than there are bits in a word, of which few are used."""
    with worker(rank, 3, folder):
        if rank:
            return
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
    run_workers(_many, 3, timeout=60)
