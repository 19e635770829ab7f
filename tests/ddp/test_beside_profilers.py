"""Other tools that put their functions into torch's allocator.

The story: the pool of gradients interposed `posix_memalign` and `free` in libc10, as memray does, whose functions call
the C library's own. When memray came after us, a gradient that lay in a block of the pool went to the C library:
`free(): invalid pointer`. When it came before us the pool was never used, and nothing said so. Now the pool interposes
what only torch calls.
"""

import ctypes
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.on_ranks import on_ranks
from torch import nn

from phalanx import DistributedDataParallel

_ROOT = Path(__file__).resolve().parents[2]
_WIDTH = 300


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    """The path of a library that does what a profiler does."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "the core is built with a C compiler"
    library = tmp_path_factory.mktemp("tool") / "tool.so"
    sources = [Path(__file__).with_name("other_tool.c"), _ROOT / "csrc" / "interpose.c"]
    arguments = ["-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", f"-I{_ROOT / 'csrc'}", "-o", library]
    subprocess.run([compiler, *arguments, *sources], check=True)
    return str(library)


def _step(ddp):
    ddp.zero_grad()
    ddp(torch.ones(4, _WIDTH)).square().mean().backward()


def _is_in_pool(ddp):
    return ddp._reducer._set.pool.contains(ddp.module[0].weight.grad)


def _build():
    return DistributedDataParallel(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 3)), check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="interposition knows ELF")
@on_ranks(2)
def test_a_tool_that_comes_before_or_after_the_pool_does_no_harm(tool):
    library = ctypes.CDLL(tool)
    for after in (True, False):
        ddp = _build() if after else None
        if ddp is not None:
            _step(ddp)
            assert _is_in_pool(ddp)
        assert library.patch_libc() >= 2
        if ddp is None:
            ddp = _build()
        for _ in range(3):
            _step(ddp)
            assert _is_in_pool(ddp)
        assert library.num_calls() > 0  # it goes on seeing what it came for


@pytest.mark.skipif(sys.platform != "linux", reason="interposition knows ELF")
@on_ranks(2)
def test_the_pool_steps_aside_for_a_tool_that_takes_its_own_place_and_says_so_once(tool):
    said = []

    class Listener(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logging.getLogger("phalanx").addHandler(Listener())
    ddp = _build()
    _step(ddp)
    ddp.zero_grad()  # what lies in the pool now, nobody could free any more
    assert ctypes.CDLL(tool).patch_torch() >= 2
    expected = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 3))
    expected.load_state_dict(ddp.module.state_dict())
    expected(torch.ones(4, _WIDTH)).square().mean().backward()
    for _ in range(3):
        _step(ddp)
        assert not _is_in_pool(ddp)
        torch.testing.assert_close([p.grad for p in ddp.parameters()], [p.grad for p in expected.parameters()])
    assert len(said) == 1
    assert "another tool has put its own functions into torch's allocator" in said[0]
    assert "copied" in said[0]


def _torchs_mappings():
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[:2] for line in mappings if line.endswith(("/libc10.so", "/libtorch_cpu.so"))]


@pytest.mark.skipif(sys.platform != "linux", reason="interposition knows ELF")
@on_ranks(2)
def test_the_pages_of_torchs_tables_that_were_read_only_are_so_again():
    """They stayed writable for the life of the process: a stray write there would send torch's calls anywhere."""
    before = _torchs_mappings()
    assert any(mode.startswith("r--") for _, mode in before)
    ddp = _build()
    _step(ddp)
    assert _is_in_pool(ddp)
    assert _torchs_mappings() == before
