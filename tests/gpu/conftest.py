"""Each test here once on CUDA (`pytest -m gpu`), and once on a simulated accelerator, by hand."""

from pathlib import Path

import pytest
from tests.gpu.devices import Place

from phalanx._comm.backend.device_backends import is_nccl_available

# Asked before any test begins: the driver opens files of its own then, which a test would seem to leave behind.
HAS_GPU = is_nccl_available()
HOW = "by hand: --simulated-accelerator FOLDER builds one with the C++ compiler"


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "sim"])
def place(request, tmp_path):
    """A device that all ranks of a test share."""
    if request.param == "cuda":
        if not HAS_GPU:
            pytest.skip("no CUDA device, or a PyTorch without NCCL")
        return Place("cuda", str(tmp_path))
    folder = request.config.getoption("--simulated-accelerator")
    if not folder:
        pytest.skip(HOW)
    from tests.simulated_accelerator import build

    return Place("sim", str(tmp_path), str(build(Path(folder))))


@pytest.fixture
def cuda(tmp_path):
    """A CUDA device."""
    if not HAS_GPU:
        pytest.skip("no CUDA device, or a PyTorch without NCCL")
    return Place("cuda", str(tmp_path))
