"""Run the blocks of libraries.md as they stand there, over Phalanx and over Gloo, and compare what they leave.

    python -m tests.libraries.run accelerate ignite     # what `make test` runs
    python -m tests.libraries.run --by-hand             # the heavy ones

The heavy ones are not among the development requirements. In an environment of their own they need nothing else:

    pip install -c constraints.txt . transformers accelerate deepspeed "ray[train]" torchft

torchft has no wheel for Python 3.14 or newer; Ray has none for 3.15, and Ignite 0.5.5 refuses 3.15.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "libraries.md"

# A block, and the modules that are imported before ranks are forked: importing some takes seconds.
LIGHT = {
    "accelerate": ["accelerate"],
    "ignite": ["ignite.distributed", "ignite.metrics"],
    "ignite-by-name": ["ignite.distributed"],
    "fabric": ["lightning.fabric"],
    "lightning": ["lightning"],
    "torchmetrics": ["torchmetrics"],
    "checkpoint": ["torch.distributed.checkpoint"],
}
BY_HAND = {"transformers": ["transformers"], "deepspeed": ["deepspeed"], "ray": ["ray.train"], "torchft": ["torchft"]}
SETTINGS: dict[str, list[dict[str, Any]]] = {"deepspeed": [{"stage": stage} for stage in (1, 2, 3)]}

_KEPT: list[Any] = []


def blocks() -> dict[str, str]:
    """The code of the document, by the name that stands behind ```python; lines are counted as in the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    found = re.finditer(r"^```python ([\w-]+)\n(.*?)^```$", text, re.M | re.S)
    return {block[1]: "\n" * text.count("\n", 0, block.start(2)) + block[2] for block in found}


def over_gloo(code: str) -> str:
    """The same block for somebody who has never heard of us."""
    return code.replace("phalanx.init()", 'phalanx.init("gloo")').replace('"phalanx"', '"gloo"')


def given() -> dict[str, Any]:
    """What the document calls the reader's: a network, data, a loss; and where a block puts its numbers."""
    import torch

    def net() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))

    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.randint(5, (60,)))
    sentences = [
        {
            "input_ids": torch.randint(50, (8,)),
            "attention_mask": torch.ones(8, dtype=torch.long),
            "labels": int(torch.randint(2, ())),
        }
        for _ in range(45)
    ]
    loss_fn = torch.nn.functional.cross_entropy
    return {"net": net, "dataset": dataset, "sentences": sentences, "loss_fn": loss_fn, "losses": []}


def run_block(rank: int, world_size: int, code: str, settings: dict[str, Any], folder: str, port: int) -> Any:
    """One rank: what the block computed, and over which backend."""
    import torch.distributed as dist

    os.chdir(folder)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="job")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")  # as torchrun's ranks do: the caller holds the store
    os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")
    names = {"__name__": "__main__", **given(), **settings}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    state = names["model"].state_dict() if "model" in names else {}
    backend = dist.get_backend() if dist.is_initialized() else None
    if backend == "phalanx":
        dist.destroy_process_group()
    elif backend is not None:  # Gloo's group, freed while autograd's threads hold parts of it, may never come back
        dist.barrier()
        _KEPT.append(names)
    return backend, names["losses"], {name.removeprefix("module."): value for name, value in state.items()}


def in_ranks(code: str, settings: dict[str, Any]) -> tuple[set[str], Any]:
    """The backends that two ranks saw, and their results."""
    import torch.distributed as dist

    from phalanx.testing import run_ranks

    # A port that nobody holds may be anybody's by the time rank 0 listens there, also the source of rank 1's own calls.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(run_block, 2, code, settings, folder, store.port, init=False, start="fork", timeout=500)
    return {backend for backend, *_ in results if backend}, [result for _, *result in results]


def with_ray(code: str, settings: dict[str, Any]) -> tuple[set[str], Any]:
    """As `in_ranks`, where Ray starts the processes."""
    import ray

    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
        try:
            names = {"__name__": "__main__", **given(), "run_config": ray.train.RunConfig(storage_path=f"{folder}/out")}
            exec(compile(code, str(DOCUMENT), "exec"), names)
        finally:
            ray.shutdown()
    return {names["result"].metrics["backend"]}, names["losses"]


def with_torchft(code: str, settings: dict[str, Any]) -> tuple[set[str], Any]:
    """As `in_ranks`; one of two replicas is killed in the fourth step, comes back, and is given the other's weights."""
    import torch
    from torchft._torchft import LighthouseServer

    gloo = 'group = "gloo"' in code
    with tempfile.TemporaryDirectory() as folder:
        lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60000, heartbeat_timeout_ms=1500
        )
        environment = {**os.environ, "LIGHTHOUSE": lighthouse.address(), "OMP_NUM_THREADS": "1"}

        def replica(number: int, attempt: int) -> subprocess.Popen[bytes]:
            words = ["-m", "tests.libraries.replica", "gloo" if gloo else "phalanx", str(number), str(attempt), folder]
            return subprocess.Popen([sys.executable, *words], env=environment, cwd=DOCUMENT.parents[1])

        try:
            first, second = replica(0, 0), replica(1, 0)
            assert second.wait(100) < 0, "replica 1 was to be killed"
            second = replica(1, 1)
            assert (first.wait(100), second.wait(100)) == (0, 0)
        finally:
            lighthouse.shutdown()
        results = [torch.load(f"{folder}/{number}") for number in range(2)]
    _same(results[0], results[1])
    return {"gloo" if gloo else "phalanx"}, results


def check(name: str, code: str, settings: dict[str, Any]) -> None:
    """Raise AssertionError unless the block gives over Phalanx, bit for bit, what it gives over Gloo."""
    launch = {"ray": with_ray, "torchft": with_torchft}.get(name, in_ranks)
    backends, ours = launch(code, settings)
    assert backends <= {"phalanx"}, f"the block ran over {backends}"
    backends, theirs = launch('group = "gloo"\n' if name == "torchft" else over_gloo(code), settings)
    assert backends <= {"gloo"}, f"the block over Gloo ran over {backends}"
    _same(ours, theirs)


def _same(ours: Any, theirs: Any) -> None:
    import torch

    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            _same(value, theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), f"{len(ours)} values over Phalanx, {len(theirs)} over Gloo"
        assert ours, "the block computed nothing"
        for mine, reference in zip(ours, theirs, strict=True):
            _same(mine, reference)
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), f"{ours} over Phalanx, {theirs} over Gloo"
    else:
        alike = ours == theirs or (math.isnan(ours) and math.isnan(theirs))
        assert alike, f"{ours} over Phalanx, {theirs} over Gloo"


def main() -> None:
    """Run what is named, and say so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*LIGHT, *BY_HAND, []])
    parser.add_argument("--by-hand", action="store_true", help="all that `make test` leaves out")
    chosen = parser.parse_args()
    code = blocks()
    for name in chosen.names + (list(BY_HAND) if chosen.by_hand else []):
        for module in {**LIGHT, **BY_HAND}[name]:
            importlib.import_module(module)
        for settings in SETTINGS.get(name, [{}]):
            check(name, code[name], settings)
            print(f"{name} {settings or ''}: the same numbers over Phalanx and over Gloo", flush=True)


if __name__ == "__main__":
    main()
