"""How long does training wait for a checkpoint, and how long do saving and loading take? Ours, torch.save and dcp."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import phalanx.checkpoint.sharded  # noqa: F401 - imports are not what is measured
from phalanx.checkpoint import CheckpointManager
from phalanx.testing import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

SIZES = {"100 MB": 100_000_000, "1 GB": 1_000_000_000}
TENSORS = 24
DISK = "disk"
PEER = "torch.save"  # a file of one rank, without fsync, as training scripts write it


def make_state(nbytes: int) -> dict[str, Any]:
    """As of a model and AdamW: tensors of different sizes."""
    numel = nbytes // 4 // TENSORS
    return {
        "model": {f"layer.{n}.weight": torch.rand(numel // 100, 100) for n in range(TENSORS // 3)},
        "optimizer": {
            "state": {
                n: {"exp_avg": torch.rand(numel // 100, 100), "exp_avg_sq": torch.rand(numel // 100, 100)}
                for n in range(TENSORS // 3)
            },
        },
        "epoch": 3,
    }


class Contestant(ABC):
    """Saves and loads one state. `save` returns how long the caller waited, and how long it took in all."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank

    @abstractmethod
    def save(self, state: dict[str, Any]) -> tuple[float, float]: ...

    @abstractmethod
    def load(self) -> None: ...


class TorchSave(Contestant):
    durable = False

    def save(self, state: dict[str, Any]) -> tuple[float, float]:
        begin = time.perf_counter()
        if self.rank == 0:
            with open(self.folder / "draft.pt", "wb") as file:
                torch.save(state, file)
                if self.durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(self.folder / "draft.pt", self.folder / "state.pt")
        dist.barrier()
        took = time.perf_counter() - begin
        return took, took

    def load(self) -> None:
        torch.load(self.folder / "state.pt", weights_only=True)


class Disk(Contestant):
    """It shows what the disk gives: rank 0 writes as many bytes from memory, with fsync, and every rank reads them."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def save(self, state: dict[str, Any]) -> tuple[float, float]:
        if not len(self._bytes):
            tensors = [*state["model"].values()]
            tensors += [moment for moments in state["optimizer"]["state"].values() for moment in moments.values()]
            self._bytes = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8).fill_(1)
        begin = time.perf_counter()
        if self.rank == 0:
            with open(self.folder / "bytes", "wb", buffering=0) as file:
                data = memoryview(self._bytes.numpy())
                for at in range(0, len(data), 1 << 24):
                    file.write(data[at : at + (1 << 24)])
                os.fsync(file.fileno())
        dist.barrier()
        took = time.perf_counter() - begin
        return took, took

    def load(self) -> None:
        data = memoryview(self._bytes.numpy())
        with open(self.folder / "bytes", "rb", buffering=0) as file:
            at = 0
            while at < len(data):
                at += file.readinto(data[at : at + (1 << 24)])


class TorchSaveDurable(TorchSave):
    durable = True


class DcpAsync(Contestant):
    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        self._count = 0
        self._group = dist.new_group(backend="gloo")  # it asks for a group of its own, on the CPU
        self._state: dict[str, Any] = {}

    def save(self, state: dict[str, Any]) -> tuple[float, float]:
        shutil.rmtree(self.folder / f"{self._count - 1}", ignore_errors=True)
        self._state = state
        begin = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=self.folder / f"{self._count}", process_group=self._group)
        blocked = time.perf_counter() - begin
        future.result()
        dist.barrier()
        self._count += 1
        return blocked, time.perf_counter() - begin

    def load(self) -> None:
        state = {"model": {n: torch.empty_like(t) for n, t in self._state["model"].items()}, "optimizer": {"state": {
            n: {key: torch.empty_like(t) for key, t in moments.items()}
            for n, moments in self._state["optimizer"]["state"].items()
        }}, "epoch": 0}  # fmt: skip
        dcp.load(state, checkpoint_id=self.folder / f"{self._count - 1}", process_group=self._group)


class Ours(Contestant):
    sharded = False

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        self.manager = CheckpointManager(folder, keep=1, sharded=self.sharded)
        self._step = 0

    def save(self, state: dict[str, Any]) -> tuple[float, float]:
        self._step += 1
        begin = time.perf_counter()
        self.manager.async_save(self._step, state)
        blocked = time.perf_counter() - begin
        self.manager.wait()
        return blocked, time.perf_counter() - begin

    def load(self) -> None:
        self.manager.load()


class OursSharded(Ours):
    sharded = True


CONTESTANTS: dict[str, type[Contestant]] = {
    DISK: Disk,
    "torch.save": TorchSave,
    "torch.save, fsync": TorchSaveDurable,
    "dcp.async_save": DcpAsync,
    "phalanx": Ours,
    "phalanx, sharded": OursSharded,
}


def measure(
    rank: int, world_size: int, folder: Path, nbytes: int, rounds: int, names: list[str]
) -> dict[str, dict[str, list[float]]]:
    """Seconds by contestant: `blocked` and `whole` of a save, `load`. The first round warms up, and is left out."""
    warnings.simplefilter("ignore")
    state = make_state(nbytes)
    contestants = {}
    for name, make in ((name, CONTESTANTS[name]) for name in names):
        place = folder / name.replace(" ", "-").replace(",", "")
        place.mkdir(exist_ok=True)
        contestants[name] = make(place, rank)
    found: dict[str, dict[str, list[float]]] = {
        name: {"first": [], "blocked": [], "whole": [], "load": []} for name in contestants
    }
    for number, order in enumerate(harness.plan_rounds(list(contestants), rounds + 1)):
        for name in order:
            contestant = contestants[name]
            _sync(os.sync)
            blocked, whole = contestant.save(state)
            load = _sync(functools.partial(_timed, contestant.load))
            if number == 0:
                found[name]["first"].append(blocked)
                continue
            found[name]["blocked"].append(blocked)
            found[name]["whole"].append(whole)
            found[name]["load"].append(load)
    return found


def _sync(act: Callable[[], Any]) -> Any:
    dist.barrier()
    result = act()
    dist.barrier()
    return result


def _timed(act: Callable[[], None]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--backend", default="phalanx")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--contestants", nargs="*", choices=CONTESTANTS, default=list(CONTESTANTS), help=f"{DISK} and {PEER} always run"
    )
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: a temporary one)")
    harness.add_output_arguments(parser, Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    machine = harness.describe_machine()
    names = [name for name in CONTESTANTS if name in {DISK, PEER, *arguments.contestants}]
    results = []
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="phalanx-checkpoints-") as folder:
            by_rank = run_ranks(
                measure, arguments.world_size, Path(folder), SIZES[size], arguments.rounds, names,
                backend=arguments.backend, timeout=1200,
            )  # fmt: skip
        # Of a round, the rank that waited longest: training goes on with the last.
        slowest = {
            name: {key: [max(values) for values in zip(*(r[name][key] for r in by_rank), strict=True)] for key in keys}
            for name, keys in by_rank[0].items()
        }
        medians = {n: {key: statistics.median(values) for key, values in k.items()} for n, k in slowest.items()}
        rows = [
            [
                name,
                harness.format_time(seconds["blocked"]),
                harness.format_ratio(seconds["blocked"] / medians[PEER]["blocked"]),
                harness.format_time(seconds["first"]),
                harness.format_time(seconds["whole"]),
                harness.format_ratio(medians[DISK]["whole"] / seconds["whole"]),
                harness.format_time(seconds["load"]),
                harness.format_ratio(medians[DISK]["load"] / seconds["load"]),
            ]
            for name, seconds in medians.items()
        ]
        header = [f"{size}, {arguments.world_size} ranks", "training waits", f"of {PEER}'s", "the first time"]
        harness.print_table([*header, "until it is saved", "rate, of the disk's", "load", "rate, of the disk's"], rows)
        results.append({"bytes": SIZES[size], "samples": slowest, "medians": medians})
    summary = {"rounds": arguments.rounds, "ranks": arguments.world_size, "backend": arguments.backend}
    harness.write_results(arguments.output, {**summary, "sizes": results}, machine=machine)


if __name__ == "__main__":
    main()
