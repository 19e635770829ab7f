"""Without the C core (no compiler at installation) each public name works, or says in one sentence what is missing.

The processes here can't import `phalanx._core`, which is what such an installation looks like to an import.
"""

import subprocess
import sys
from pathlib import Path

import pytest

_HIDE = "import sys; sys.modules['phalanx._core'] = None\n"
_SENTENCE = "Phalanx's C core is not installed"


def _run(code: str, *words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _HIDE + code, *words], capture_output=True, text=True, timeout=600, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_public_name_of_the_facade_and_of_its_packages_is_there():
    """`from phalanx import rpc` was "cannot import name '_core'", and with it `Trainer` and eleven other names."""
    code = """
import importlib, phalanx
failed = []
def look(holder, name):
    try:
        return getattr(holder, name)
    except Exception as error:
        failed.append((holder.__name__, name, repr(error)))
for name in phalanx.__all__:
    value = look(phalanx, name)
    if name in phalanx._PACKAGES and value is not None:
        for inner in getattr(value, "__all__", [each for each in dir(value) if not each.startswith("_")]):
            look(value, inner)
print(len(phalanx.__all__), failed)
"""
    count, _, failed = _run(code).strip().partition(" ")
    assert int(count) > 40
    assert failed == "[]"


@pytest.mark.slow
def test_every_module_is_imported_or_says_what_is_missing():
    code = f"""
import importlib, pkgutil, phalanx
works, says = [], []
for module in pkgutil.walk_packages(phalanx.__path__, "phalanx."):
    if module.name.endswith(("__main__", "._core")):
        continue
    try:
        importlib.import_module(module.name)
        works.append(module.name)
    except ImportError as error:
        assert str(error).startswith({_SENTENCE!r}) and "compiler" in str(error), (module.name, error)
        says.append(module.name)
print(len(works), *says)
"""
    works, *says = _run(code).split()
    assert int(works) > 300
    assert "phalanx._comm.symmetric_memory.memory" in says
    assert not [name for name in says if name.startswith(("phalanx.rpc", "phalanx.trainer", "phalanx.elastic"))]


_CALLS = """
import operator
import torch
from phalanx.testing import run_ranks

def call(rank, world_size, path):
    from phalanx import rpc

    options = rpc.RpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    peer = f"worker{1 - rank}"
    sums = [float(rpc.rpc_sync(peer, torch.add, (torch.ones(n), rank)).sum()) for n in (0, 1, 3, 70_000)]
    kept = rpc.remote(peer, operator.mul, (6, 7))
    futures = [rpc.rpc_async(peer, operator.add, (n, 1)) for n in range(20)]
    with rpc.autograd.context() as number:
        weight = torch.ones(3, requires_grad=True)
        rpc.autograd.backward(number, [rpc.rpc_sync(peer, torch.mul, (weight, 5.0)).sum()])
        gradient = rpc.autograd.get_gradients(number)[weight].tolist()
    try:
        rpc.rpc_sync(peer, operator.truediv, (1, 0))
    except ZeroDivisionError:
        gradient.append("divided")
    values = [future.wait() for future in futures]
    result = sums, kept.to_here(), values == list(range(1, 21)), gradient
    rpc.shutdown()
    return result

for rank, result in enumerate(run_ranks(call, 2, sys.argv[1], init=False)):
    assert result == ([n * (1.0 + rank) for n in (0, 1, 3, 70_000)], 42, True, [5.0] * 3 + ["divided"]), result
print("called")
"""


@pytest.mark.slow
def test_remote_calls_go_over_sockets(tmp_path):
    assert _run(_CALLS, str(tmp_path / "store")) == "called\n"


_REPORT = """
import phalanx.report
try:
    phalanx.report.begin(sys.argv[1])
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_a_report_says_that_it_needs_the_core(tmp_path):
    said = _run(_REPORT, str(tmp_path / "report"))
    assert said.startswith(_SENTENCE)
    assert said.count("\n") == 1
