"""Answers are the same whichever thread reads them: in a mode of torch, with a lock of the user's, or neither."""

from __future__ import annotations

import warnings

import torch
from tests.rpc.workers import run_caller
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


def _in_modes():
    expected = _describe(make_tensors())
    for _ in range(3):  # the first call goes over the connection, and others over a line where that is possible
        for name, mode in MODES.items():
            with mode() as it:
                own = rpc.rpc_sync("w1", make_tensors), rpc.rpc_async("w1", make_tensors).wait()
                seen = list(getattr(it, "seen", ()))
            assert [_describe(one) for one in own] == [expected] * 2, name
            assert seen == [], name


def test_a_thread_in_a_mode_of_torch_gets_ordinary_tensors():
    """It got inference tensors, tensors without their data on the default device, and errors of FakeTensorMode."""
    run_caller(_in_modes, 2)
