"""NVML without a GPU, for what counts GPUs and asks how they are: the launcher, the doctor."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def build_nvml(folder: Path) -> dict[str, str]:
    """Compile it into `folder`; the variables with which a new process finds it. FAKE_GPUS and others say what it says.

    Skips the test where there is no C compiler.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a library with NVML's names")
    source = Path(__file__).with_name("nvml.c")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O0", str(source), "-o", str(library)], check=True)
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))}
