"""PyTorch's own suite for rpc, as it lies in its wheel, over torch.distributed.rpc or over phalanx.rpc.

The suite imports `torch.distributed.rpc` by name. For ours, copies of its modules are imported while `rpc_modules`
stand in the place of PyTorch's; its tests are not changed. Ranks are forked, and in each the copies are what
pickle finds.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates parts of itself that its suite imports
    from torch.testing._internal.common_utils import TestCase

from tests.conformance import rpc_modules
from tests.conformance.torch_suite import Result, _skips

import phalanx.rpc
from phalanx.testing import RankFailed, run_ranks

_SUITE = "torch.testing._internal.distributed.rpc"
# Everything of the suite that says `torch.distributed.rpc`, in the order of its imports.
_COPIED = (
    "torch.testing._internal.dist_utils",
    f"{_SUITE}.rpc_agent_test_fixture",
    f"{_SUITE}.tensorpipe_rpc_agent_test_fixture",
    f"{_SUITE}.rpc_test",
    f"{_SUITE}.dist_autograd_test",
    f"{_SUITE}.dist_optimizer_test",
)
CLASSES = {
    "RpcTest": f"{_SUITE}.rpc_test",
    "TensorPipeAgentRpcTest": f"{_SUITE}.rpc_test",
    "DistAutogradTest": f"{_SUITE}.dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": f"{_SUITE}.dist_autograd_test",
    "DistOptimizerTest": f"{_SUITE}.dist_optimizer_test",
}
WORLD_SIZE = 4


class RpcSuite:
    """The suite over "torch" or "phalanx"."""

    def __init__(self, over: str) -> None:
        self.over = over
        stand_ins = rpc_modules.build() if over == "phalanx" else {}
        self._modules: dict[str, ModuleType] = {}
        with _in_place(stand_ins), mock.patch.dict(sys.modules), _without_script(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _COPIED:
                sys.modules.pop(name, None)
            for name in _COPIED:
                self._modules[name] = importlib.import_module(name)
        self._modules.update(stand_ins)

    def tests(self) -> list[str]:
        """The names of all tests, each with its class."""
        found = []
        for name in CLASSES:
            tests = self._class(name)
            found += [
                f"{name}.{test}"
                for test in dir(tests)
                if test.startswith("test_") and not getattr(getattr(tests, test), "__unittest_skip__", False)
            ]
        return sorted(found)

    def _class(self, name: str) -> Any:
        return getattr(self._modules[CLASSES[name]], name)

    def run(self, test: str, *, timeout: float = 60.0) -> Result:
        """Run one test on all ranks."""
        with tempfile.TemporaryDirectory(prefix="phalanx-conformance-", ignore_cleanup_errors=True) as folder:
            try:
                skips = run_ranks(self._on_rank, WORLD_SIZE, test, folder, init=False, timeout=timeout)
            except RankFailed as failure:
                return Result(test, "failed", str(failure))
        if all(skips):
            return Result(test, "skipped", skips[0])
        return Result(test, "passed")

    def _on_rank(self, rank: int, world_size: int, test: str, folder: str) -> str:
        warnings.simplefilter("ignore")
        sys.modules.update(self._modules)
        fixture = self._modules[f"{_SUITE}.tensorpipe_rpc_agent_test_fixture"]
        # Torch asks `fi_info` which transports there are, and fails where PATH has a folder that this user cannot read.
        fixture.tp_transports = lambda: None
        kind, _, method = test.partition(".")

        class Case(self._class(kind), fixture.TensorPipeRpcAgentTestFixture, TestCase):  # type: ignore[name-defined,misc]
            file_name = os.path.join(folder, "init")

        Case.__module__, Case.__qualname__ = __name__, "Case"  # tests send methods of theirs
        setattr(sys.modules[__name__], "Case", Case)  # noqa: B010
        case = Case(method)
        case.rank = rank
        os.environ.update(MASTER_ADDR="127.0.0.1")
        with _in_place({n: m for n, m in self._modules.items() if n in rpc_modules.NAMES}), _skips() as skip:
            case.setUp()
            getattr(case, method)()
        if dist.is_initialized():
            dist.destroy_process_group()
        if phalanx.rpc.current.is_set():
            phalanx.rpc.shutdown(graceful=False)
        return skip[0] if skip else ""


@contextmanager
def _without_script() -> Iterator[None]:
    """TorchScript knows PyTorch's own RRef alone: what it cannot compile over ours is left as it is."""
    compile_ = torch.jit.script

    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compile_(obj, *args, **kwargs)
        except Exception:
            return obj

    with mock.patch.object(torch.jit, "script", script):
        yield


@contextmanager
def _in_place(modules: dict[str, ModuleType]) -> Iterator[None]:
    """`modules` in the place of PyTorch's own, for whoever imports them, and as attributes of their packages."""
    with mock.patch.dict(sys.modules, modules):
        before = {}
        for name, module in modules.items():
            package, _, last = name.rpartition(".")
            if package in modules:
                continue
            before[name] = getattr(sys.modules[package], last)
            setattr(sys.modules[package], last, module)
        try:
            yield
        finally:
            for name, module in before.items():
                package, _, last = name.rpartition(".")
                setattr(sys.modules[package], last, module)
