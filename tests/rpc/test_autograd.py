"""Backward across workers: the gradients are those of the same computation in one process."""

import contextlib
import os
import signal
import threading
from typing import Any

import pytest
import torch
from tests.rpc.workers import dismiss, join, run_caller, run_workers, set_event, until, wait_event

from phalanx import rpc
from phalanx.errors import PeerLostError
from phalanx.rpc import autograd, line, wire
from phalanx.rpc.autograd.serve import worker as autograd_worker

NAMES = ["w0", "w1", "w2"]


_table = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
_hooked: list[int] = []


def gradient_of_table(context_id: int) -> torch.Tensor:
    assert _table.grad is None
    return autograd.get_gradients(context_id)[_table]


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
    return torch.nn.functional.embedding(ids, _table, sparse=True)


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
        line.CalleeLine.send = _send  # type: ignore[method-assign]
        return

    def send_or_fail(self, kind, *args):
        if kind == wire.REPLY:
            raise MemoryError("no room for an answer")
        _send(self, kind, *args)

    line.CalleeLine.send = send_or_fail  # type: ignore[method-assign]


_send = line.CalleeLine.send


def num_hooked() -> int:
    return len(_hooked)


def num_contexts() -> int:
    return len(autograd_worker().contexts.all())


def wait_no_contexts() -> None:
    """A worker hears of a context's end after who ended it has gone on: ask until all have."""
    for name in NAMES:
        while rpc.rpc_sync(name, num_contexts):
            pass


def _one_by_one() -> None:
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
        found = rpc.rpc_sync("w1", gradient_of_table, (context_id,))
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
        with pytest.raises(RuntimeError, match=r"arrived in context \d+: a graph ends with its context. Call detach"):
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
    run_caller(_one_by_one, 3)


def _losses(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join(rank, 3, folder, rpc_timeout=60)
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


def test_a_worker_lost_during_backward_is_named_at_the_caller_and_the_others_continue():
    from phalanx.testing import RankFailed

    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        run_workers(_losses, 3)
    assert "Traceback" not in str(caught.value), caught.value


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


def _in_modes() -> None:
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


def test_no_grad_of_the_caller_means_no_graph_and_a_mode_of_the_callee_means_nothing():
    """A future that another call set under no_grad lost its tensor's graph, and gradients were missing."""
    run_caller(_in_modes, 2)


def contexts_here() -> list[int]:
    return [context.id for context in autograd_worker().contexts.all()]


def _wait_and_ask(x: torch.Tensor, name: str) -> torch.Tensor:
    wait_event(name)
    return rpc.rpc_sync("w2", weigh, (x,))


def _outlives() -> None:
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
    run_caller(_outlives, 3)
