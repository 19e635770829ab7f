"""Where the tests of this folder run: on CUDA, and, to know that their bodies are right, on a simulated accelerator."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.testing import run_ranks


@dataclass(frozen=True)
class Place:
    """A kind of device; `library` is the simulated one's, `folder` for the files of one test."""

    kind: str
    folder: str
    library: str = ""

    def run(self, fn, world_size, *args, lost=(), timeout=110.0):
        """`run_ranks` of fn(rank, world_size, place, *args); all ranks get the same device where there is one."""
        # The question whether there is a GPU has initialised CUDA in this process: no fork of it could use the GPU.
        start = "spawn" if self.kind == "cuda" else "fork"
        return run_ranks(fn, world_size, self, *args, init=False, lost=lost, timeout=timeout, start=start)

    def device(self, index=0):
        """The device, in a rank."""
        if self.kind == "sim":
            from tests.simulated_accelerator import load

            return load(self.library)
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def join(self, rank, world_size, timeout_s=60.0, backend="phalanx"):
        """This rank's device, in a group of `world_size` ranks on it."""
        device = self.device()
        if self.kind == "sim":
            from phalanx._comm.backend.device_backends import DEVICE_BACKENDS, DeviceBackend, find_shared_gpu

            DEVICE_BACKENDS["sim"] = DeviceBackend("NCCL", lambda: True, None, lambda _: "SIM-0", find_shared_gpu)
        store = dist.FileStore(os.path.join(self.folder, "store"), world_size)
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        return device

    def slow_fill(self, tensor, value, ms):
        """Queue a kernel that takes `ms` and fills `tensor`; return at once."""
        if self.kind == "sim":
            torch.ops.simulated_accelerator.slow_fill_(tensor, value, ms)
        else:
            torch.cuda._sleep(ms * 2_000_000)  # cycles, at some 2 GHz
            tensor.fill_(value)
