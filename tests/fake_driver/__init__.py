"""NVIDIA's libraries for a host without a GPU: they count GPUs that are not there, and write down who calls them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("driver.c")
_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


@dataclass(frozen=True)
class Call:
    """Of one of the libraries' functions, by a process in which CUDA_VISIBLE_DEVICES was `visible`."""

    pid: int
    function: str
    visible: str


@dataclass(frozen=True)
class FakeDriver:
    """`environment` makes a process find it."""

    environment: dict[str, str]
    log: Path

    def calls(self) -> list[Call]:
        """All so far, in their order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        fields = [line.split(" ", 2) for line in lines]
        return [Call(int(pid), function, visible) for pid, function, visible in fields]


def build(folder: Path, *, gpus: int) -> FakeDriver:
    """Compile it. Skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder.mkdir(exist_ok=True)
    for name in _LIBRARIES:
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(_SOURCE)]
        subprocess.run(command, check=True)
    log = folder / "calls"
    before = os.environ.get("LD_LIBRARY_PATH")
    return FakeDriver(
        {
            "LD_LIBRARY_PATH": str(folder) if before is None else f"{folder}:{before}",
            "FAKE_DRIVER_CALLS": str(log),
            "FAKE_DRIVER_GPUS": str(gpus),
        },
        log,
    )
