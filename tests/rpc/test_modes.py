"""Answers are the same whichever thread reads them: in a mode of torch, with a lock of the user's, or neither."""

from __future__ import annotations

import itertools
import random
import threading
import warnings

import torch
from tests.rpc.workers import run_workers, same, set_event, until, wait_event, worker
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx import rpc


class SeesFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class SeesOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


MODES = {
    "inference": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
    "functions": SeesFunctions,
    "operations": SeesOperations,
    "fake": FakeTensorMode,
    "no grad": torch.no_grad,
}


def make_tensors():
    """Tensors that are made anew in each way that there is."""
    warnings.simplefilter("ignore")  # torch's: some layouts are new, and quantization goes
    return {
        "plain": torch.arange(6.0).view(2, 3),
        "empty": torch.empty(0, 3),
        "gaps": torch.arange(32.0).view(8, 4)[::2],
        "turned": torch.arange(6).view(2, 3).t(),
        "by name": torch.arange(3).to(torch.uint16),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "grad": torch.ones(3, requires_grad=True),
    }


def _describe(tensors):
    kinds = {}
    for name, one in tensors.items():
        assert type(one) is torch.Tensor, (name, type(one))
        values = (one.dequantize() if one.is_quantized else one.to_dense()).tolist()
        kinds[name] = (one.device.type, one.layout, tuple(one.shape), one.is_inference(), one.requires_grad, values)
    return kinds


def _in_modes(rank, folder):
    with worker(rank, 2, folder):
        if rank:
            return
        expected = _describe(make_tensors())
        for number, (name, mode) in enumerate(MODES.items()):
            entered, seen = threading.Event(), []

            def wait(mode=mode, number=number, entered=entered, seen=seen):
                with mode() as it:
                    entered.set()
                    rpc.rpc_sync("w1", wait_event, (f"event {number}",))
                    seen.extend(getattr(it, "seen", ()))

            waiter = threading.Thread(target=wait, name="phalanx-test-waiter")
            assert rpc.rpc_sync("w1", same, (1,)) == 1
            waiter.start()
            assert entered.wait(30)
            for _ in range(3):
                assert _describe(rpc.rpc_sync("w1", make_tensors)) == expected, name
                future = rpc.rpc_async("w1", make_tensors)
                until(future.has_come)
                assert _describe(future.wait()) == expected, name
            with rpc.autograd.context() as context:
                x = torch.ones(3, requires_grad=True)
                future = rpc.rpc_async("w1", torch.mul, (x, 2.0))
                until(future.has_come)
                rpc.autograd.backward(context, [future.wait().sum()])
                assert rpc.autograd.get_gradients(context)[x].tolist() == [2.0] * 3
            rpc.rpc_sync("w1", set_event, (f"event {number}",))
            waiter.join()
            assert seen == [], name
            with mode():
                own = rpc.rpc_sync("w1", make_tensors)
            assert _describe(own) == expected, name


def test_a_thread_in_a_mode_of_torch_gets_ordinary_tensors_and_so_do_others():
    """Others got inference tensors, tensors without their data on the default device, and errors of FakeTensorMode."""
    run_workers(_in_modes, 2)


_users = threading.Lock()


class Locked:
    """Unpickled, it wants a lock of the user's."""

    def __init__(self, value):
        self.value = value

    def __setstate__(self, state):
        with _users:
            self.__dict__.update(state)


def lock_in(value, where):
    locked = Locked(value)
    return {"bare": locked, "list": [1, [locked]], "tensor": {"t": torch.ones(3), "l": locked}, "rref": rpc.RRef(1)}[
        where
    ], locked


def _with_locks(rank, folder):
    with worker(rank, 2, folder):
        if rank:
            return
        draw = random.Random(5)
        for number, where in enumerate(itertools.islice(itertools.cycle(("bare", "list", "tensor", "rref")), 12)):
            event = f"lock {number}"
            held = threading.Event()

            def hold(event=event, held=held):
                with _users:
                    held.set()
                    rpc.rpc_sync("w1", wait_event, (event,))

            holder = threading.Thread(target=hold, name="phalanx-test-holder")
            holder.start()
            assert held.wait(30)
            futures = [rpc.rpc_async("w1", lock_in, (value, where)) for value in range(draw.randint(1, 3))]
            numbers = [rpc.rpc_async("w1", same, (value,)) for value in range(3)]
            assert [one.wait() for one in numbers] == [0, 1, 2]  # nobody is stuck
            rpc.rpc_async("w1", set_event, (event,))
            holder.join(30)
            assert not holder.is_alive()
            assert [one.wait()[1].value for one in futures] == list(range(len(futures)))


def test_unpickling_an_answer_never_waits_in_a_thread_that_waits_for_another_one():
    """A thread that waited with a lock of the user's read another thread's answer, whose class wanted the lock."""
    run_workers(_with_locks, 2)
