"""Where the tests of this folder run: on CUDA, and, to know that their bodies are right, on a simulated accelerator."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.testing import run_ranks


class _SimulatedMapping:
    def __init__(self, fd, nbytes):
        self.tensor = torch.ops.simulated_accelerator.map_file(fd, nbytes)

    def close(self):
        """Nothing: the simulated accelerator keeps it."""


class _SimulatedMemory:
    """Memory of the simulated accelerator that several processes map."""

    def create(self, device, nbytes):
        fd = os.memfd_create("simulated accelerator")
        os.ftruncate(fd, nbytes)
        return fd, _SimulatedMapping(fd, nbytes)

    def open(self, fd, device, nbytes):
        return _SimulatedMapping(fd, nbytes)


def _go_through_the_host(kind):
    from phalanx.backend.device_backends import DEVICE_BACKENDS

    DEVICE_BACKENDS[kind] = dataclasses.replace(DEVICE_BACKENDS[kind], memory=None)


@dataclass(frozen=True)
class Place:
    """A kind of device; `library` is the simulated one's, `folder` for the files of one test.

    `maps_memory`: ranks map each other's memory of the device; else what NCCL does not carry goes through the host's.
    """

    kind: str
    folder: str
    library: str = ""
    maps_memory: bool = True

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
            from phalanx.backend.device_backends import DEVICE_BACKENDS, DeviceBackend
            from phalanx.engines.nccl import find_shared_gpu

            memory = _SimulatedMemory() if self.maps_memory else None
            DEVICE_BACKENDS["sim"] = DeviceBackend(
                "NCCL", lambda: True, None, lambda _: "SIM-0", find_shared_gpu, memory
            )
        elif not self.maps_memory:
            _go_through_the_host(self.kind)
        store = dist.FileStore(os.path.join(self.folder, "store"), world_size)
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        if backend == "phalanx":
            dist.group.WORLD.on_device_from_bytes = 0
        return device

    def slow_fill(self, tensor, value, ms):
        """Queue a kernel that takes `ms` and fills `tensor`; return at once."""
        if self.kind == "sim":
            torch.ops.simulated_accelerator.slow_fill_(tensor, value, ms)
        else:
            torch.cuda._sleep(ms * 2_000_000)  # cycles, at some 2 GHz
            tensor.fill_(value)
