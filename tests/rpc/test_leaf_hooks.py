"""Hooks of leaves in a backward pass across workers: they are called as over TensorPipe, with the same gradients."""

import random
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.autograd
import torch.distributed.rpc
from tests.rpc.workers import check_same, run_workers, worker
from tests.threads import map_in_threads

import phalanx.rpc
import phalanx.rpc.autograd

NAMES = ["w0", "w1", "w2"]
rpc: ModuleType = phalanx.rpc  # or torch's, in the processes that run over TensorPipe
autograd: ModuleType = phalanx.rpc.autograd


# -- generated programs ------------------------------------------------------------------------------------------------
# A program is data: steps of which each takes one or two earlier values, runs an operation here or on another worker,
# and may use a leaf of that worker, which steps share. All values are used, as TensorPipe waits for those that are not.

OPS = ["mul", "add", "leaf", "leaf", "leaf", "none"]


class NoGradient(torch.autograd.Function):
    """Its input has a gradient of None."""

    @staticmethod
    def forward(ctx, x):
        return x * 0

    @staticmethod
    def backward(ctx, gradient):
        return None


def make_program(rng: random.Random, num_inputs: int, depth: int, places: list[int | None]) -> list[tuple]:
    program = []
    for _ in range(rng.randint(2, 5)):
        num_known = num_inputs + len(program)
        arguments = rng.sample(range(num_known), rng.randint(1, min(2, num_known)))
        where = rng.choice(places)
        if depth and where is not None and rng.random() < 0.4:
            program.append((where, "call", arguments, make_program(rng, len(arguments), depth - 1, places)))
        else:
            program.append((where, rng.choice(OPS), arguments, rng.randrange(2)))
    return program


def run_op(op: str, which: int, *inputs: torch.Tensor) -> torch.Tensor:
    total = sum(inputs[1:], inputs[0])
    if op == "mul":
        return total * inputs[0] * 0.3
    if op == "leaf":
        return total * _leaves[which].value
    if op == "none":
        return total + NoGradient.apply(_leaves[which].value)
    return total * 0.7


def run_program(program: list[tuple], *inputs: torch.Tensor) -> torch.Tensor:
    known = list(inputs)
    for where, op, arguments, body in program:
        args = [known[one] for one in arguments]
        fn, first = (run_program, (body,)) if op == "call" else (run_op, (op, body))
        known.append(fn(*first, *args) if where is None else rpc.rpc_sync(NAMES[where], fn, (*first, *args)))
    return sum(known[1:], known[0])


# -- leaves and what is heard of them ----------------------------------------------------------------------------------

KINDS = ["tensor", "tensor times", "before", "before times", "before none", "after", "after empty", "removed"]
Call = tuple[Any, ...]


def copies(values: Any) -> Any:
    """Copy the tensors in a hook's arguments: TensorPipe's next pass adds to them in place."""
    if isinstance(values, tuple):
        return tuple(copies(one) for one in values)
    return None if values is None else values.clone()


class Leaf:
    """A tensor of this worker with hooks, and their calls in order."""

    def __init__(self, kinds: list[str], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.value = torch.rand(2, 3, generator=generator, dtype=torch.float64).requires_grad_()
        self.node = self.value.expand_as(self.value).grad_fn.next_functions[0][0]
        self.calls: list[Call] = []
        self.context_id = -1
        for number, kind in enumerate(kinds):
            self.register(f"{number} {kind}", kind)

    def register(self, name: str, kind: str) -> None:
        def hear(result: Any, *args: Any) -> Any:
            self.calls.append((name, *copies(args), self.value.grad, self.in_context()))
            return result

        value, node = self.value, self.node
        if kind == "tensor":
            value.register_hook(lambda g: hear(None, g))
        elif kind == "tensor times":
            value.register_hook(lambda g: hear(None if g is None else (g * 3).clamp(max=2.0), g))
        elif kind == "before":
            node.register_prehook(lambda g: hear(None, g))
        elif kind == "before times":
            node.register_prehook(lambda g: hear(None if g[0] is None else (g[0] * 2,), g))
        elif kind == "before none":
            node.register_prehook(lambda g: hear((None,), g))
        elif kind == "after":
            node.register_hook(lambda out, g: hear(None, out, g))
        elif kind == "after empty":
            node.register_hook(lambda out, g: hear((), out, g))
        elif kind == "removed":
            node.register_hook(lambda out, g: hear(None, out, g)).remove()
            node.register_prehook(lambda g: hear(None, g)).remove()
        elif kind == "raise":
            node.register_hook(self.fail)
        elif kind == "wrong":
            node.register_prehook(lambda g: hear([g[0]], g))

    def fail(self, *args: Any) -> None:
        self.calls.append(("raise", *args))
        raise KeyError("a hook of mine")

    def in_context(self) -> torch.Tensor | None:
        """The gradient that has gathered."""
        return copies(autograd.get_gradients(self.context_id).get(self.value))


_leaves: list[Leaf] = []


def make_leaves(kinds: list[list[str]], seed: int) -> None:
    _leaves[:] = [Leaf(one, seed + number) for number, one in enumerate(kinds)]


def set_context(context_id: int) -> None:
    for one in _leaves:
        one.context_id = context_id


def take_calls() -> list[list[Call]]:
    found = [one.calls[:] for one in _leaves]
    for one in _leaves:
        one.calls.clear()
    return found


def gradients_of_mine(context_id: int) -> list[torch.Tensor | None]:
    assert all(one.value.grad is None for one in _leaves)
    found = autograd.get_gradients(context_id)
    return [found.get(one.value) for one in _leaves]


def on_all(fn: Any, *args: Any) -> list[Any]:
    return [rpc.rpc_sync(name, fn, args) for name in NAMES]


def record_program(rng: random.Random, seed: int) -> list[Any]:
    """Return what all hooks heard, the gradients at the end of each context, and what was raised."""
    kinds = [[rng.sample(KINDS, rng.randint(0, 5)) for _ in range(2)] for _ in NAMES]
    trouble = rng.choice([None, None, None, "raise", "wrong"])
    if trouble is not None:
        kinds[0][rng.randrange(2)].append(trouble)
    for rank, name in enumerate(NAMES):
        rpc.rpc_sync(name, make_leaves, (kinds[rank], seed + 10 * rank))
    # After an error TensorPipe waits without end, or crashes, where other workers take part.
    program = make_program(rng, 1, 2, [None, 0, 1, 2] if trouble is None else [None])
    heard: list[Any] = []
    for _ in range(2):  # contexts
        num_passes = rng.randint(1, 3)
        with autograd.context() as context_id:
            on_all(set_context, context_id)
            loss = run_program(program, _leaves[0].value).sum()
            raised = False
            try:
                for number in range(num_passes):
                    autograd.backward(context_id, [loss], retain_graph=number + 1 < num_passes)
            except RuntimeError:
                raised = True
            calls = on_all(take_calls)
            if raised:  # what else has run by then depends on time
                calls = [one for worker in calls for one in worker if any(call[0] == "raise" for call in one)]
                heard.append(("raised", calls))
            else:
                heard.append((calls, on_all(gradients_of_mine, context_id)))
    return heard


def _record_over_torch(rank: int, folder: str, seed: int, count: int) -> Any:
    global rpc, autograd
    rpc, autograd = torch.distributed.rpc, torch.distributed.autograd
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of its own use of a group
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    found = record_programs(seed, count) if rank == 0 else None
    rpc.shutdown()
    return found


def _record(rank: int, folder: str, seed: int, count: int) -> Any:
    with worker(rank, 3, folder):
        return record_programs(seed, count) if rank == 0 else None


def record_programs(seed: int, count: int) -> list[Any]:
    torch.set_num_threads(1)
    return [record_program(random.Random(seed + one), seed + one) for one in range(count)]


@pytest.mark.slow
def test_hooks_of_leaves_are_called_as_over_tensorpipe():
    """Hooks of the nodes that add to `.grad` were never called: nothing here adds to `.grad`."""
    if not torch.distributed.rpc.is_available():
        pytest.skip("this torch has no TensorPipe")
    expected = run_workers(_record_over_torch, 3, 500, 40, timeout=100)[0]
    found = run_workers(_record, 3, 500, 40, timeout=100)[0]
    check_same(found, expected)
    contexts = [one for program in expected for one in program]
    leaves = [leaf for one in contexts if one[0] != "raised" for of_worker in one[0] for leaf in of_worker]
    calls = [call for leaf in leaves for call in leaf]
    assert {call[0].partition(" ")[2] for call in calls} == set(KINDS) - {"removed"}
    assert sum(one[0] == "raised" for one in contexts) >= 5
    assert sum(call[1] is None for call in calls) >= 5


def go(x: torch.Tensor, then: str | None) -> torch.Tensor:
    y = x * _leaves[0].value
    return y if then is None else rpc.rpc_sync(then, go, (y, None))


def _raises(rank: int, folder: str) -> None:
    with worker(rank, 3, folder):
        if rank:
            return
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        for number, (kind, text) in enumerate(
            [("raise", "KeyError was raised on worker 'w2'"), ("wrong", "expected tuple, but hook returned 'list'")] * 3
        ):
            rpc.rpc_sync("w2", make_leaves, ([[kind, "after"]], 1))
            rpc.rpc_sync("w1", make_leaves, ([["after"]], 1))
            with autograd.context() as context_id:
                for name in ("w1", "w2"):
                    rpc.rpc_sync(name, set_context, (context_id,))
                loss = rpc.rpc_sync("w1", go, (x, "w2")).sum()
                with pytest.raises(autograd.BackwardError, match=rf"(?s)Error on Node 2: .*{text}"):
                    autograd.backward(context_id, [loss], retain_graph=bool(number % 2))
                assert len(rpc.rpc_sync("w2", take_calls)[0]) == 1


def test_a_hook_that_raises_on_another_worker_ends_the_pass_with_its_error():
    run_workers(_raises, 3, timeout=120)


# -- nodes of tensors that have arrived --------------------------------------------------------------------------------


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


def _hooks_of_arrived(rank: int, folder: str) -> None:
    with worker(rank, 2, folder):
        if rank:
            return
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
    run_workers(_hooks_of_arrived, 2, timeout=120)


# -- several passes at a time ------------------------------------------------------------------------------------------


def scale(factor: float, x: torch.Tensor) -> torch.Tensor:
    return x * factor * _leaves[0].value


def listen_for_contexts() -> None:
    """Note which context each call of a hook is inside of, and what has gathered there."""

    def after(_: Any, gradients: Any) -> None:
        context = phalanx.rpc.autograd.serve.worker().contexts.current
        assert context is not None
        _leaves[0].calls.append((context.id, gradients[0].clone(), context.gradients[_leaves[0].value].clone()))

    _leaves[0].node.register_hook(after)


def _at_once(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with worker(rank, 3, folder):
        if rank:
            return
        on_all(make_leaves, [[]], 3)
        rpc.rpc_sync("w1", listen_for_contexts)
        totals: dict[int, torch.Tensor] = {}

        def run(factor: float) -> None:
            x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
            for _ in range(15):
                with autograd.context() as context_id:
                    loss = rpc.rpc_sync("w1", scale, (factor, x)).sum()
                    autograd.backward(context_id, [loss])
                    totals[context_id] = torch.full((2, 3), factor, dtype=torch.float64)

        map_in_threads(run, (1.0, 2.0, 3.0, 4.0))
        calls = rpc.rpc_sync("w1", take_calls)[0]
        assert len(calls) == len(totals) == 60
        for context_id, gradient, gathered in calls:
            assert torch.equal(gradient, totals[context_id])
            assert torch.equal(gathered, totals[context_id])


def test_hooks_of_passes_that_run_at_once_each_see_their_own_context():
    run_workers(_at_once, 3, timeout=120)


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


def _inside(rank: int, folder: str) -> Any:
    with worker(rank, 3, folder):
        if rank:
            return
        on_all(make_leaves, [["after"]], 3)
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        with autograd.context() as context_id:
            on_all(set_context, context_id)
            autograd.backward(context_id, [rpc.rpc_sync("w1", runs_engine, (x,)).sum()])
            leaf, grad, gathered, calls = rpc.rpc_sync("w1", what_came, (context_id,))
        assert torch.equal(gathered, torch.ones_like(leaf))
        assert torch.equal(grad, leaf.cos())
        assert len(calls) == 2  # the node's hook, of either run


def what_came(context_id: int) -> Any:
    leaf = _leaves[0]
    return leaf.value.detach(), leaf.value.grad, autograd.get_gradients(context_id)[leaf.value], leaf.calls


def test_a_backward_inside_of_a_pass_does_not_gather_in_the_context():
    run_workers(_inside, 3, timeout=120)


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


def _find_grad(rank: int, folder: str) -> None:
    with worker(rank, 2, folder):
        if rank:
            return
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
    run_workers(_find_grad, 2)


def _cross(rank: int, folder: str) -> None:
    with worker(rank, 3, folder):
        if rank:
            return
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
    run_workers(_cross, 3, timeout=60)
