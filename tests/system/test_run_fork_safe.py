"""Ranks are forked from a process that has never touched CUDA, or are told that it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tests import fake_driver
from tests.system.phalanx_command import run, write_script

from phalanx._job.agent.cuda_context import describe, find_cuda_use

# What a rank sees of itself and of the process that it was forked from, before and after it uses CUDA.
LOOK = """
import ctypes, json, os, sys
from pathlib import Path

def look(pid):
    fds = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return {"devices": [path for path in fds if path.startswith("/dev/nvidia")],
            "maps": "libcuda.so" in Path(f"/proc/{pid}/maps").read_text()}

assert "torch" in sys.modules, "the zygote has imported it"
import torch
import phalanx
seen = {"zygote": look(os.getppid()), "rank": look(os.getpid()), "initialised": torch.cuda.is_initialized(),
        "bad fork": torch.cuda._is_in_bad_fork(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
with phalanx.init() as job:
    torch.distributed.all_reduce(torch.ones(3))
    torch.distributed.barrier()
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    seen |= {"pid": os.getpid(), "parent": os.getppid(), "local": os.environ["LOCAL_RANK"]}
    torch.distributed.barrier()
Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "visible", "num_ranks", "rest"),
    [(["gpu"], None, 4, ""), (["auto"], "2,0", 2, ""), (["gpu"], None, 4, "torch.optim.SGD([torch.ones(1)], lr=1)")],
)
def test_agent_and_zygote_never_initialise_cuda_and_each_rank_may(
    words: list[str], visible: str | None, num_ranks: int, rest: str, tmp_path: Path
) -> None:
    """With a driver that counts four GPUs and writes down who asks: the agent counts, and nobody else says anything.

    A rank that sets CUDA_VISIBLE_DEVICES before its first use of CUDA gets what it says: nothing has read it before.
    """
    driver = fake_driver.build(tmp_path / "driver", gpus=4)
    environment = driver.environment if visible is None else {**driver.environment, "CUDA_VISIBLE_DEVICES": visible}
    script = write_script(tmp_path, LOOK + rest)
    finished = run("--nproc-per-node", *words, script, str(tmp_path), env=environment)
    assert finished.code == 0, finished.err
    assert "CUDA was initialised" not in finished.err  # a build for GPUs says itself that this driver is too old
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    assert not (tmp_path / f"{num_ranks}.json").exists()
    for one in seen:
        assert (one["initialised"], one["bad fork"], one["visible"]) == (False, False, visible)
        assert one["zygote"]["devices"] == one["rank"]["devices"] == []
        if torch.version.cuda is None:  # else torch itself may have linked it, which initialises nothing
            assert not one["zygote"]["maps"]
            assert not one["rank"]["maps"]
    calls = driver.calls()
    ranks, zygotes = {one["pid"]: one["local"] for one in seen}, {one["parent"] for one in seen}
    counted = [call for call in calls if call.pid not in ranks]
    assert [call.function for call in counted] == ["nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"]
    assert len(zygotes) == 1
    assert {call.pid for call in counted}.isdisjoint(zygotes)
    by_ranks = {(call.function, call.visible) for call in calls if call.pid in ranks and call.function == "cuInit"}
    assert by_ranks == {("cuInit", local) for local in ranks.values()}


@pytest.mark.slow
def test_a_plugin_that_initialises_cuda_while_torch_is_imported_costs_the_early_import(tmp_path: Path) -> None:
    """torch's import runs plugins of other packages; one that makes a CUDA context broke every forked rank."""
    (tmp_path / "eager.py").write_text(
        "import ctypes, os, torch\n"
        "def load():\n"
        "    ctypes.CDLL('libcuda.so.1').cuInit(0)\n"
        "    torch.cuda._initialized = True  # what a build without CUDA can't do itself\n"
    )
    information = tmp_path / "eager-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: eager\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\neager = eager:load\n")
    script = write_script(
        tmp_path,
        "import os, sys\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print('rank', os.environ['RANK'], os.getpid(), os.getppid())\n",
    )
    driver = fake_driver.build(tmp_path / "driver", gpus=0)
    finished = run("--nproc-per-node", "1", script, env={**driver.environment, "PYTHONPATH": str(tmp_path)})
    assert finished.code == 0, finished.err
    assert finished.err.count("CUDA was initialised (torch.cuda.is_initialized()) in the process that forks") == 1
    assert "Suspects: eager (eager:load). Each rank therefore imports torch itself" in finished.err
    said = [line.split()[-2:] for _, line in finished.by_rank]
    (zygote,) = {parent for _, parent in said}
    initialised = [str(call.pid) for call in driver.calls() if call.function == "cuInit"]
    assert initialised[0] == zygote
    assert sorted(initialised[1:]) == sorted(pid for pid, _ in said)


class _Torch:
    class cuda:
        initialised = False

        @classmethod
        def is_initialized(cls) -> bool:
            return cls.initialised


class _TorchInUse(_Torch):
    class cuda(_Torch.cuda):
        initialised = True


def test_what_tells_that_cuda_is_in_use() -> None:
    assert find_cuda_use({}, ["/dev/null", "socket:[1]"]) == ""
    assert find_cuda_use({"torch": object()}, []) == ""  # half imported
    assert find_cuda_use({"torch": _Torch}, []) == ""
    assert find_cuda_use({"torch": _TorchInUse}, []) == "torch.cuda.is_initialized()"
    opened = ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia0"]
    assert find_cuda_use({"torch": _Torch}, opened) == "open: /dev/nvidia0, /dev/nvidiactl"


def test_without_the_early_import_it_is_pythons_start_that_is_to_blame() -> None:
    said = describe("open: /dev/nvidia0", preloads=False)
    assert "when Python started; the ranks can't use a GPU" in said
    assert "sitecustomize" in said


_MONITOR = """
import os, threading, time
def begin():
    threading.Thread(target=time.sleep, args=(1000,), name="monitor", daemon=True).start()
begin()
if "AGAIN" in os.environ:
    os.register_at_fork(after_in_child=begin)
"""


@pytest.mark.slow(but=("True-False-True",))
@pytest.mark.parametrize(
    ("again", "as_program", "is_there"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_a_thread_of_sitecustomize_is_in_the_ranks_as_the_page_says(
    tmp_path: Path, again: bool, as_program: bool, is_there: bool
) -> None:
    """Monitoring agents start a thread before the script. Only the zygote had it, and nothing said so."""
    (tmp_path / "sitecustomize.py").write_text(_MONITOR)
    script = write_script(tmp_path, "import threading; print('monitor' in [t.name for t in threading.enumerate()])")
    words = ("--no-python", sys.executable, script) if as_program else ("--no-preload", script)
    env = {"PYTHONPATH": str(tmp_path), **({"AGAIN": "1"} if again else {})}
    finished = run("--nproc-per-node", "1", *words, env=env)
    assert finished.by_rank == [(0, str(is_there))], finished.err
