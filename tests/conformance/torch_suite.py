"""PyTorch's own suite for c10d backends, as it lies in its wheel, with any backend in the place of Gloo.

The suite decides by the backend's name, mostly while it is imported, which tests it skips. So it is imported as if for
Gloo (or MPI), and from then on every group that it makes is of the backend that is asked for:

    import:     BACKEND = "gloo"      what Gloo is tested for, this backend is tested for
    test runs:  BACKEND = "phalanx"   every group is made, and names itself, as this
                BACKEND == "gloo"     holds as well: the few comparisons inside tests take Gloo's branch

Where the suite spawns processes that import torch anew, ours are forked. Its test methods are not changed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates parts of itself that its suite imports
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

import phalanx._comm.backend.create
import phalanx._comm.backend.process_group  # noqa: F401 - imported once here, not once in each rank of each test
from phalanx.testing import RankFailed, run_ranks

_MODULE = "torch.testing._internal.distributed.distributed_test"


class _PlayedBy(str):
    """The name of a backend, which is also equal to the name of the one whose part it plays."""

    part: str

    def __new__(cls, name: str, part: str) -> _PlayedBy:
        self = super().__new__(cls, name)
        self.part = part
        return self

    def __eq__(self, other: object) -> bool:
        return other == self.part or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@dataclass(frozen=True)
class Result:
    """How one test went: "passed", "skipped" (by the suite itself, on every rank) or "failed", and why."""

    test: str
    outcome: str
    text: str = ""


class TorchSuite:
    """The suite for `world_size` ranks of `backend`, in the part of "gloo" or "mpi"."""

    def __init__(self, backend: str, world_size: int, *, part: str = "gloo") -> None:
        self.backend = backend
        self.world_size = world_size
        self._environment = {"BACKEND": part, "WORLD_SIZE": str(world_size), "INIT_METHOD": "file://"}
        self._module = self._load()
        self._module.BACKEND = _PlayedBy(backend, part)  # type: ignore[attr-defined]
        if backend == "phalanx":  # whose calls have an event each in the profiler
            for supported in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
                getattr(self._module, supported).append(backend)
        self._environment["BACKEND"] = backend

    def _load(self) -> ModuleType:
        # A module of its own per suite: the decorators of the tests have read the environment for good.
        found = importlib.util.find_spec(_MODULE)
        assert found is not None
        name = f"{_MODULE}_{self.world_size}_{self.backend}"
        spec = importlib.util.spec_from_file_location(name, found.origin)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # pickle looks here for the objects that object collectives send
        with mock.patch.dict(os.environ, self._environment), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
        return module

    def tests(self) -> list[str]:
        """The names of the suite's tests, less those that it skips without a look at the machine."""
        base = self._module.DistributedTest._DistTestBase
        names = [name for name in dir(base) if name.startswith("test_")]
        return sorted(name for name in names if not getattr(getattr(base, name), "__unittest_skip__", False))

    def run(self, test: str, *, timeout: float = 60.0) -> Result:
        """Run one test on all ranks."""
        with tempfile.TemporaryDirectory(prefix="phalanx-conformance-", ignore_cleanup_errors=True) as folder:
            for name in ("barrier", "test_dir", "init_dir"):  # where the suite expects them
                os.mkdir(os.path.join(folder, name))
            try:
                skips = run_ranks(self._on_rank, self.world_size, test, folder, init=False, timeout=timeout)
            except RankFailed as failure:
                return Result(test, "failed", str(failure))
        if all(skips):
            return Result(test, "skipped", skips[0])
        return Result(test, "passed")

    def _on_rank(self, rank: int, world_size: int, test: str, folder: str) -> str:
        """What the suite's own `_run` does on a rank; returns why the test was skipped, or nothing."""
        os.environ.update(self._environment, TEMP_DIR=folder, MASTER_ADDR="127.0.0.1")
        self._module.INIT_METHOD = f"file://{folder}/init-again"  # type: ignore[attr-defined]
        warnings.simplefilter("default")
        case = self._case(test, folder, world_size)
        case.rank = rank
        case.file_name = f"{folder}/init"
        with _skips() as skip:
            dist.init_process_group(
                init_method=case.init_method,
                backend=self._module.BACKEND,
                world_size=world_size,
                rank=rank,
                timeout=timedelta(seconds=self._module.CUSTOM_PG_TIMEOUT.get(test, self._module.default_pg_timeout)),
            )
            case._barrier()
            set_rng_seed()
            getattr(case, test)()
        case._barrier(wait_for=world_size)
        if dist.is_initialized():
            dist.destroy_process_group()
        return skip[0] if skip else ""

    def _case(self, test: str, folder: str, world_size: int) -> Any:
        store = dist.FileStore(f"{folder}/meetings", world_size)
        met = 0

        def barrier(self: object, wait_for: int = world_size, timeout: float = 10) -> None:
            # The suite's barrier, which polls files ten times a second, outside any group.
            nonlocal met
            met += 1
            if store.add(f"barrier-{met}", 1) == wait_for:
                store.set(f"barrier-{met}-over", "")
            store.wait([f"barrier-{met}-over"], timedelta(seconds=timeout))

        class Case(self._module.TestDistBackend, self._module.DistributedTest._DistTestBase):  # type: ignore[name-defined,misc]
            _barrier = barrier

        return Case(test)


@contextmanager
def _skips() -> Iterator[list[str]]:
    """Collects why a test was skipped: the suite raises, or exits with a code that stands for a reason."""
    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    collected: list[str] = []
    try:
        yield collected
    except unittest.SkipTest as skip:
        collected.append(str(skip))
    except SystemExit as exit_:
        if exit_.code not in reasons:
            raise
        collected.append(reasons[exit_.code])
