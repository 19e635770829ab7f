"""`torch.distributed` over a backend by name, and Phalanx's two shorter ways: symmetric tensors and direct calls.

Varieties: `gloo`; `phalanx` (ordinary tensors); `phalanx-symmetric` (those of `phalanx.shared_empty`); `phalanx-direct`
(ordinary tensors, the C core called with addresses and sizes, as mpi4py calls an MPI).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from cases import ROOT, Case
from torch import Tensor

from contestants.contract import BoundCall, Contestant, Options

_TIMEOUT_NS = 120 * 10**9


class TorchContestant:
    """A rank whose collectives go through `torch.distributed`."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target

    def bind(self, case: Case) -> BoundCall:
        source, target = self._source[: case.source_count], self._target[: case.target_count]
        if case.op in ("all_reduce", "broadcast"):
            target = source
        return BoundCall(self._call(case.op, target, source), source.numpy(), target.numpy())

    def _call(self, op: str, target: Tensor, source: Tensor) -> Callable[[], object]:
        return {
            "all_reduce": partial(dist.all_reduce, target),
            "broadcast": partial(dist.broadcast, target, ROOT),
            "all_gather": partial(getattr(dist, "all_gather_single", dist.all_gather_into_tensor), target, source),
            "reduce_scatter": partial(
                getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor), target, source
            ),
            "all_to_all": partial(dist.all_to_all_single, target, source),
        }[op]

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()


class DirectContestant(TorchContestant):
    """A rank that calls Phalanx's core without `torch.distributed` in between."""

    def _call(self, op: str, target: Tensor, source: Tensor) -> Callable[[], object]:
        from phalanx._base.dtypes import dtype_of

        core = dist.group.WORLD.symm_mem.core
        world_size, code = dist.get_world_size(), dtype_of(target.dtype).code
        end = (_TIMEOUT_NS, 0, (target.numel(),))  # of every call: how long, and what the flight recorder keeps

        def parts(tensor: Tensor) -> tuple[tuple[int, ...], int]:
            count = tensor.numel() // world_size
            return tuple(tensor.data_ptr() + 4 * count * r for r in range(world_size)), count

        if op == "all_reduce":
            at = target.data_ptr()
            return partial(core.all_reduce, at, at, target.numel(), code, 0, -1, *end)
        if op == "broadcast":
            return partial(core.broadcast, target.data_ptr(), 4 * target.numel(), code, ROOT, *end)
        outputs, count = parts(target)
        inputs, received = parts(source)
        if op == "all_gather":
            return partial(core.gather, source.data_ptr(), outputs, (4 * count,) * world_size, code, -1, *end)
        if op == "reduce_scatter":
            return partial(core.reduce_scatter, inputs, (received,) * world_size, target.data_ptr(), code, 0, *end)
        sizes = (4 * received,) * world_size
        return partial(core.all_to_all, inputs, sizes, outputs, sizes, code, 0, *end)

    def close(self) -> None:
        code, rank = dist.group.WORLD.symm_mem.core.poison()  # the calls' statuses were not looked at one by one
        if code:
            raise RuntimeError(f"the core ended the group with status {code} on rank {rank}")
        super().close()


def connect(rank: int, world_size: int, max_count: int, options: Options) -> Contestant:
    """Join the default group of the variety's backend over a store that is a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(options.rendezvous_folder) / "store"), world_size)
    dist.init_process_group(
        options.variety.partition("-")[0],
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    source, target = _memory(options.variety, max_count), _memory(options.variety, max_count)
    kind = DirectContestant if options.variety == "phalanx-direct" else TorchContestant
    return kind(source, target)


def _memory(variety: str, count: int) -> Tensor:
    if variety != "phalanx-symmetric":
        return torch.zeros(count)
    import phalanx

    return phalanx.shared_empty(count, dtype=torch.float32).zero_()
