"""Backward across workers: the gradients are those of the same computation in one process."""

import contextlib
import os
import random
import signal
import threading
from typing import Any

import pytest
import torch
from tests.rpc.workers import dismiss, run_workers, set_event, until, wait_event, worker
from tests.threads import map_in_threads

from phalanx import rpc
from phalanx.ddp import DistributedDataParallel
from phalanx.errors import PeerLostError
from phalanx.rpc import autograd, line, wire
from phalanx.rpc.autograd.serve import worker as autograd_worker

NAMES = ["w0", "w1", "w2"]


def weights(rank: int) -> list[torch.Tensor]:
    """Those that live on a worker; the same ones on each that asks for them."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.rand(2, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


_mine: list[torch.Tensor] = []
_making = threading.Lock()
_hooked: list[int] = []


def mine() -> list[torch.Tensor]:
    """This worker's. Several threads ask for them at once: without the lock, two made six of three."""
    with _making:
        if not _mine:
            _mine.extend(weights(rpc.get_worker_info().id))
    return _mine


# -- generated computations --------------------------------------------------------------------------------------------
# A program is data: a list of steps, each of which takes earlier results. A step may run on another worker (by
# rpc_sync, rpc_async or remote), use weights of that worker, and call a program of its own there.


def make_program(rng: random.Random, num_inputs: int, depth: int, length: int) -> list[tuple]:
    program = []
    for _ in range(length):
        num_known = num_inputs + len(program)
        arguments = [rng.randrange(num_known) for _ in range(rng.choice([1, 2, 2, 3]))]
        where = rng.choice([None, None, 0, 1, 2])
        how = rng.choice(["sync", "async", "remote"])
        if where is not None and depth and rng.random() < 0.5:
            body = make_program(rng, len(arguments), depth - 1, rng.randint(1, 3))
            program.append((where, how, "call", arguments, body))
        else:
            program.append((where, how, rng.choice(["mul", "sin", "weight", "cut", "two"]), arguments, None))
    return program


def apply(op: str, inputs: list[torch.Tensor], own: list[torch.Tensor]) -> torch.Tensor:
    first = inputs[0]
    if op == "mul":
        for one in inputs[1:]:
            first = first * one
        return first * 0.9
    if op == "sin":
        return sum(one.sin() for one in inputs)
    if op == "weight":
        return (first * own[len(inputs) - 1]).tanh()
    if op == "cut":
        return first.detach() * 0.5 + sum(inputs[1:], torch.zeros_like(first))
    halves = first.split(1)
    return torch.cat([halves[1], halves[0] * 2]) * inputs[-1]


def run_op(op: str, *inputs: torch.Tensor) -> torch.Tensor:
    return apply(op, list(inputs), mine())


def run_program(program: list[tuple], *inputs: torch.Tensor) -> torch.Tensor:
    """Across workers; the result is the sum of the last two values."""
    known = list(inputs)
    for where, how, op, arguments, body in program:
        args = [known[one] for one in arguments]
        fn, first = (run_program, body) if op == "call" else (run_op, op)
        if where is None:
            known.append(run_op(op, *args) if op != "call" else run_program(body, *args))
        elif how == "sync":
            known.append(rpc.rpc_sync(NAMES[where], fn, (first, *args)))
        elif how == "async":
            known.append(rpc.rpc_async(NAMES[where], fn, (first, *args)).wait())
        else:
            known.append(rpc.remote(NAMES[where], fn, (first, *args)).to_here())
    return known[-1] + known[-2] if len(known) > 1 else known[-1]


def run_alone(program: list[tuple], here: int, everything: list[list[torch.Tensor]], *inputs: torch.Tensor):
    """In one process."""
    known = list(inputs)
    for where, _, op, arguments, body in program:
        args = [known[one] for one in arguments]
        at = here if where is None else where
        if op == "call":
            known.append(run_alone(body, at, everything, *args))
        else:
            known.append(apply(op, args, everything[at]))
    return known[-1] + known[-2] if len(known) > 1 else known[-1]


def gradients_of_mine(context_id: int) -> list[torch.Tensor | None]:
    assert all(one.grad is None for one in mine())
    found = autograd.get_gradients(context_id)
    return [found.get(one) for one in mine()]


def check_programs(seed: int, count: int, caller: int = 0) -> int:
    """Compare so many generated computations; how many of them sent something."""
    rng = random.Random(seed)
    num_sent = 0
    for number in range(count):
        program = make_program(rng, 2, 2, rng.randint(2, 7))
        twice = rng.random() < 0.3
        everything = [weights(rank) for rank in range(3)]
        inputs = [torch.rand(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(one)) for one in (7, 8)]
        inputs = [one.requires_grad_() for one in inputs]
        alone = run_alone(program, caller, everything, *inputs).sum()
        if not alone.requires_grad:
            continue
        flat = [*inputs, *(one for own in everything for one in own)]
        expected = torch.autograd.grad(alone, flat, allow_unused=True)
        with autograd.context() as context_id:
            loss = run_program(program, *inputs).sum()
            assert torch.equal(loss, alone)
            if twice:
                autograd.backward(context_id, [loss], retain_graph=True)
            autograd.backward(context_id, [loss])
            here = autograd.get_gradients(context_id)
            found = [here.get(one) for one in inputs]
            for name in NAMES:
                found += rpc.rpc_sync(name, gradients_of_mine, (context_id,))
            num_sent += bool(autograd_worker().contexts.find(context_id).sends)
        for position, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert (one is None) == (other is None), (seed, number, position, program)
            if one is not None:
                torch.testing.assert_close(
                    one, other * (2 if twice else 1), msg=f"{seed} {number} {position} {program}"
                )
        assert all(one.grad is None for one in inputs)
    return num_sent


def _generated(rank: int, folder: str, seed: int, count: int) -> None:
    torch.set_num_threads(1)
    with worker(rank, 3, folder):
        # All three at once, and two threads of the first: contexts are apart.
        def run(seed: int) -> None:
            assert check_programs(seed, count, rank) > count // 4

        map_in_threads(run, [seed + 10 * rank + one for one in range(2 - (rank > 0))])


@pytest.mark.slow
def test_gradients_of_generated_computations_are_those_of_one_process():
    run_workers(_generated, 3, 100, 25, timeout=120)


# -- one thing at a time -----------------------------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("no backward here")


class Waiting(torch.autograd.Function):
    """Backward, says that it is there, and waits for ever."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        rpc.rpc_sync("w0", set_event, ("is there",))
        threading.Event().wait()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fails_backward(x: torch.Tensor) -> torch.Tensor:
    return Failing.apply(x)


def waits_backward(x: torch.Tensor) -> torch.Tensor:
    return Waiting.apply(x)


def through(then: str, x: torch.Tensor, fn) -> torch.Tensor:
    return rpc.rpc_sync(then, fn, (x * 3,)) * 5


def add_reference(reference: rpc.RRef, x: torch.Tensor) -> torch.Tensor:
    return reference.to_here() + x


def lookup(ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, mine()[0], sparse=True)


def clamp_hook(x: torch.Tensor) -> torch.Tensor:
    """What goes on to another worker and is used here as well; a hook that is not linear counts how often it runs."""
    y = x * 2

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        _hooked.append(1)
        return gradient.clamp(max=1.0)

    y.register_hook(hook)
    return rpc.rpc_sync("w2", double, (y,)) + y


def fail_to_answer(fails: bool) -> None:
    """From here on, what others order of this worker over a line."""
    if not fails:
        line.ServedLine.send = _send  # type: ignore[method-assign]
        return

    def send_or_fail(self, kind, *args):
        if kind == wire.REPLY:
            raise MemoryError("no room for an answer")
        _send(self, kind, *args)

    line.ServedLine.send = send_or_fail  # type: ignore[method-assign]


_send = line.ServedLine.send


def num_hooked() -> int:
    return len(_hooked)


def num_contexts() -> int:
    return len(autograd_worker().contexts.all())


def wait_no_contexts() -> None:
    """A worker hears of a context's end after who ended it has gone on: ask until all have."""
    for name in NAMES:
        while rpc.rpc_sync(name, num_contexts):
            pass


def _one_by_one(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with worker(rank, 3, folder):
        if rank:
            return
        x = torch.rand(2, 3, dtype=torch.float64).requires_grad_()

        # What nobody uses is not waited for, and a call that needs no gradient is none of backward's business.
        with autograd.context() as context_id:
            rpc.rpc_sync("w1", double, (x,))
            y = rpc.rpc_sync("w1", double, (x.detach(),))
            autograd.backward(context_id, [(x * y).sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], x.detach() * 2)
            assert autograd_worker().contexts.find(context_id).passes == {}
        assert x.grad is None

        # A part of the graph that sees gradients from here and from there runs once, with their sum.
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("w1", clamp_hook, (x,)).sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full_like(x, 2.0))
            assert rpc.rpc_sync("w1", num_hooked) == 1

        # References: made in the context on one worker, fetched on another.
        with autograd.context() as context_id:
            reference = rpc.remote("w1", double, (x,))
            loss = rpc.rpc_sync("w2", add_reference, (reference, x)).sum()
            autograd.backward(context_id, [loss])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full_like(x, 3.0))

        # Sparse gradients stay sparse, and add up.
        with autograd.context() as context_id:
            loss = (rpc.rpc_sync("w1", lookup, (torch.tensor([0, 1, 1]),)) * x[0]).sum()
            autograd.backward(context_id, [loss], retain_graph=True)
            autograd.backward(context_id, [loss])
            found = rpc.rpc_sync("w1", gradients_of_mine, (context_id,))[0]
            assert found.is_sparse
            torch.testing.assert_close(found.to_dense(), torch.stack([x[0], 2 * x[0]]).detach() * 2)

        # no_grad records nothing.
        with autograd.context(), torch.no_grad():
            assert not rpc.rpc_sync("w1", double, (x.detach(),)).requires_grad

        # A graph ends with its context; and plain backward() does not cross workers.
        with autograd.context():
            old = rpc.rpc_sync("w1", double, (x,))
            with pytest.raises(RuntimeError, match=r"phalanx\.rpc\.autograd\.backward"):
                old.sum().backward(retain_graph=True)
        with autograd.context() as context_id:
            loss = (rpc.rpc_sync("w1", double, (x,)) * old).sum()
            with pytest.raises(
                RuntimeError, match=r"arrived in context \d+: a graph ends with its context. Call detach"
            ):
                autograd.backward(context_id, [loss])

        # What is raised elsewhere is raised here, by name, and the context can go on.
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("w1", through, ("w2", x, fails_backward)).sum()
            with pytest.raises(autograd.BackwardError, match=r"Error on Node 2: 'no backward here'") as caught:
                autograd.backward(context_id, [loss])
            assert "KeyError was raised on worker 'w2' (rank 2" in str(caught.value)
            loss = rpc.rpc_sync("w1", through, ("w2", x, double)).sum()
            autograd.backward(context_id, [loss])

        # An answer that cannot be sent is told as an error: who asked for it waited for ever.
        rpc.rpc_sync("w1", fail_to_answer, (True,))
        with autograd.context() as context_id, pytest.raises(MemoryError, match="no room for an answer"):
            autograd.backward(context_id, [rpc.rpc_sync("w1", double, (x,)).sum()])
        rpc.rpc_sync("w1", fail_to_answer, (False,))

        for call, error, text in [
            (lambda: autograd.backward(5, [x.sum()]), RuntimeError, "Could not find autograd context with id: 5"),
            (lambda: autograd.get_gradients(5), RuntimeError, "Could not find autograd context with id: 5"),
            (lambda: autograd.backward(None, [x.sum()]), TypeError, "incompatible function arguments"),
        ]:
            with pytest.raises(error, match=text):
                call()
        with autograd.context() as context_id:
            for roots, error, text in [
                ([], RuntimeError, "No tensors"),
                ([x.detach()], RuntimeError, "requires_grad not set"),
                ([x * 2], RuntimeError, "not a scalar"),
                ([torch.ones((), requires_grad=True)], RuntimeError, "valid gradient function"),
                ([3], TypeError, "incompatible function arguments"),
            ]:
                with pytest.raises(error, match=text):
                    autograd.backward(context_id, roots)
            with pytest.raises(RuntimeError, match="Already have an autograd context"), autograd.context():
                pass
        wait_no_contexts()


def test_backward_waits_for_no_gradient_that_never_comes_and_runs_each_node_once():
    run_workers(_one_by_one, 3, timeout=120)


def _losses(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=60)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 2:
        threading.Event().wait()
    if rank == 0:
        x = torch.rand(2, 3).requires_grad_()
        doomed = rpc.rpc_sync("w2", os.getpid)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("w1", through, ("w2", x, waits_backward)).sum()
            late = rpc.rpc_sync("w2", double, (x,)).sum()

            def kill() -> None:
                wait_event("is there")
                os.kill(doomed, signal.SIGKILL)

            killer = threading.Thread(target=kill, name="test-killer")
            killer.start()
            with pytest.raises(PeerLostError, match=r"worker 'w2' .* is lost"):
                autograd.backward(context_id, [loss])
            killer.join()
            with pytest.raises(PeerLostError, match=r"worker 'w2' .* is lost"):
                autograd.backward(context_id, [late])
            again = rpc.rpc_sync("w1", double, (x,)).sum()
            autograd.backward(context_id, [again])
        while rpc.rpc_sync("w1", num_contexts):
            pass
        dismiss("w1", "over")
    else:
        wait_event("over")
    with contextlib.suppress(PeerLostError):
        rpc.shutdown()


def test_a_worker_that_is_lost_during_backward_is_named_at_the_caller_and_the_others_go_on():
    from phalanx.testing import RankFailed

    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        run_workers(_losses, 3, timeout=120)
    assert "Traceback" not in str(caught.value), caught.value


def _dense_and_remote(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with worker(rank, 3, folder):
        if rank == 2:
            return
        store = torch.distributed.FileStore(f"{folder}/group", 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        torch.manual_seed(0)
        dense = torch.nn.Linear(3, 2).double()
        model = DistributedDataParallel(dense)
        inputs = [torch.rand(4, 3, dtype=torch.float64) for _ in range(2)]
        before = torch.ones_like(dense.weight)
        dense.weight.grad = before
        for _ in range(3):
            with autograd.context() as context_id:
                loss = model(rpc.rpc_sync("w2", run_op, ("weight", inputs[rank][:2]))).square().sum()
                autograd.backward(context_id, [loss])
                found = autograd.get_gradients(context_id)[dense.weight]
                remote = rpc.rpc_sync("w2", gradients_of_mine, (context_id,))[0]
                assert dense.weight.grad is before
        alone = torch.nn.Linear(3, 2).double()
        alone.load_state_dict(dense.state_dict())
        own = weights(2)
        losses = [alone(apply("weight", [one[:2]], own)).square().sum() for one in inputs]
        expected = torch.autograd.grad(sum(losses) / 2, alone.weight, retain_graph=True)[0]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(remote, torch.autograd.grad(losses[rank], own[0])[0])
        torch.distributed.destroy_process_group()


def test_dense_layers_in_ddp_are_averaged_while_the_rest_is_on_a_server():
    """Their hooks look at .grad, which a backward across workers leaves alone: they were not averaged at all."""
    run_workers(_dense_and_remote, 3, timeout=120)


# -- modes of autograd -------------------------------------------------------------------------------------------------

_weight = torch.full((3,), 2.0, requires_grad=True)
_promised: list[tuple[Any, Any]] = []


@rpc.functions.async_execution
def ask(x: torch.Tensor) -> Any:
    future: Any = torch.futures.Future()
    _promised.append((future, x * _weight))
    return future


def keep_promise(mode: str) -> None:
    until(lambda: bool(_promised))
    future, value = _promised.pop()
    with _MODES[mode]():
        future.set_result(value)


def weigh(x: torch.Tensor) -> torch.Tensor:
    return x * _weight


def gradient_of_weight(context_id: int) -> Any:
    found = autograd.get_gradients(context_id).get(_weight)
    return None if found is None else found.tolist()


_MODES: dict[str, Any] = {
    "grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
}  # fmt: skip


def _in_modes(rank: int, folder: str) -> None:
    with worker(rank, 2, folder):
        if rank:
            return
        for mode, enter in _MODES.items():
            with autograd.context() as context_id:
                x = torch.full((3,), 5.0, requires_grad=True)
                answer = rpc.rpc_async("w1", ask, (x,))
                rpc.rpc_sync("w1", keep_promise, (mode,))
                autograd.backward(context_id, [answer.wait().sum()])
                assert autograd.get_gradients(context_id)[x].tolist() == [2.0] * 3, mode
                assert rpc.rpc_sync("w1", gradient_of_weight, (context_id,)) == [5.0] * 3, mode
            with autograd.context() as context_id:
                rref = rpc.remote("w1", weigh, (x,))
                with enter():
                    answers = rpc.rpc_sync("w1", weigh, (x,)), rpc.rpc_async("w1", weigh, (x,)).wait(), rref.to_here()
                autograd.backward(context_id, [sum(answers).sum()])
                found = autograd.get_gradients(context_id)
                if mode == "grad":
                    assert {one: gradient.tolist() for one, gradient in found.items()} == {x: [6.0] * 3}
                    assert rpc.rpc_sync("w1", gradient_of_weight, (context_id,)) == [15.0] * 3
                else:  # as over TensorPipe: the answers have no graph, and are leaves
                    assert all(one.is_leaf and one.requires_grad and not one.is_inference() for one in answers)
                    assert {one: gradient.tolist() for one, gradient in found.items()} == {
                        one: [1.0] * 3 for one in answers
                    }
                    assert rpc.rpc_sync("w1", gradient_of_weight, (context_id,)) is None


def test_a_mode_of_who_asks_means_no_graph_and_one_of_who_answers_means_nothing():
    """A future that another call set under no_grad lost its tensor's graph, and gradients were missing."""
    run_workers(_in_modes, 2)


def contexts_here() -> list[int]:
    return [context.id for context in autograd_worker().contexts.all()]


def _wait_and_ask(x: torch.Tensor, name: str) -> torch.Tensor:
    wait_event(name)
    return rpc.rpc_sync("w2", weigh, (x,))


def _outlives(rank: int, folder: str) -> None:
    with worker(rank, 3, folder):
        if rank:
            return
        for number in range(10):
            x = torch.ones(3, requires_grad=True)
            with autograd.context():
                late = rpc.rpc_async("w1", _wait_and_ask, (x, f"go {number}"))
                rpc.rpc_sync("w1", weigh, (x,))
                if number % 2:  # w2 knows the context already
                    rpc.rpc_sync("w2", weigh, (x,))
            until(lambda: not rpc.rpc_sync("w1", contexts_here))
            rpc.rpc_sync("w1", set_event, (f"go {number}",))
            assert late.wait().tolist() == [2.0] * 3
        for to in NAMES:
            until(lambda to=to: not rpc.rpc_sync(to, contexts_here))


def test_a_call_that_outlives_its_context_takes_it_nowhere():
    """The worker that its function called kept the context, and its graph, for ever."""
    run_workers(_outlives, 3)
