"""DeepSpeed's all_reduce in shared memory (csrc/cpu/comm), built by peers.py from the sources in DeepSpeed's sdist.

It has one operation, all_reduce by SUM in place; everything else in DeepSpeed goes through Gloo.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path

import torch
from cases import Case

from contestants.contract import BoundCall, Contestant, NotOfferedError, Options

MODULE = "deepspeed_shm_comm"
BUILD = Path(sys.prefix) / "deepspeed-build"


class DeepSpeedContestant:
    """A rank of DeepSpeed's shared-memory group."""

    def __init__(self, max_count: int) -> None:
        self._data = torch.zeros(max_count)
        self._one = torch.zeros(1)

    def bind(self, case: Case) -> BoundCall:
        if case.op != "all_reduce":
            raise NotOfferedError("DeepSpeed's shared-memory path has all_reduce only")
        data = self._data[: case.source_count]
        all_reduce = torch.ops.deepspeed.inference_all_reduce_.default
        return BoundCall(partial(all_reduce, data), data.numpy(), data.numpy())

    def barrier(self) -> None:
        torch.ops.deepspeed.inference_all_reduce_(self._one.zero_())

    def close(self) -> None:
        """Nothing to leave: the segments have no name any more and go with the processes."""


def connect(rank: int, world_size: int, max_count: int, options: Options) -> Contestant:
    """Load the extension and start its shared memory; the port only makes the segments' names unique."""
    torch.set_num_threads(1)
    os.environ["LOCAL_SIZE"] = str(world_size)
    os.environ["MASTER_ADDR"] = "benchmark"
    os.environ["MASTER_PORT"] = Path(options.rendezvous_folder).name
    spec = importlib.util.spec_from_file_location(MODULE, BUILD / f"{MODULE}.so")
    if spec is None or spec.loader is None:
        raise ImportError(f"no extension {MODULE}.so in {BUILD}")
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    extension.initialize(world_size, rank)
    contestant = DeepSpeedContestant(max_count)
    contestant.barrier()  # everybody has mapped everything: the names, which DeepSpeed would leave behind, can go
    for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_{rank}"):
        segment.unlink()
    return contestant
