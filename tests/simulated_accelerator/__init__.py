"""A device for tests: memory that the host must not touch, streams, events; see `device.cpp`.

`load(path)` of the built library makes it the device "sim" of this process, with the names of `torch.cuda`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("device.cpp")


def build(folder: Path) -> Path:
    """Compile it against this PyTorch's headers, some 15 seconds; the library's path.

    Raises:
        RuntimeError: it cannot be built; with what the compiler says.
    """
    root = Path(torch.__file__).parent
    library = folder / f"simulated_accelerator_{torch.__version__}.so"
    if library.exists() and library.stat().st_mtime > _SOURCE.stat().st_mtime:
        return library
    folder.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}")
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    flags = [
        "-std=c++20",
        "-O1",
        "-w",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    command = [os.environ.get("CXX", "c++"), *flags, *include, str(_SOURCE), "-o", str(partial)]
    command += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"no C++ compiler: {error}") from None
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    partial.rename(library)
    return library


def load(library: str | os.PathLike[str]) -> torch.device:
    """The device, in this process; once."""
    if not hasattr(torch, "sim"):
        torch.ops.load_library(os.fspath(library))
        torch.utils.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", _module())
        torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device("sim", 0)


def _module() -> types.ModuleType:
    sim = types.ModuleType("torch.sim")
    sim.is_available = lambda: True
    sim.is_initialized = lambda: True
    sim.device_count = lambda: 1
    sim.current_device = lambda: 0
    sim.set_device = lambda device: None
    sim.device = lambda device: contextlib.nullcontext()
    sim._is_in_bad_fork = lambda: False
    sim.manual_seed = sim.manual_seed_all = lambda seed: None
    sim.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    sim.current_stream = lambda device=None: torch.accelerator.current_stream("sim:0")
    sim.synchronize = lambda device=None: torch.accelerator.synchronize("sim:0")
    sim.Stream = lambda device=None: torch.Stream(device=torch.device("sim", 0))
    sim.Event = lambda: torch.Event(device=torch.device("sim", 0))
    sim.stream = lambda stream: stream
    sys.modules["torch.sim"] = sim
    return sim
