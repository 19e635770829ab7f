"""`torch.distributed` over a backend by name, and Phalanx's two shorter ways: arena tensors and direct calls.

Varieties: `gloo`; `phalanx` (ordinary tensors); `phalanx-arena` (tensors of `phalanx.shared_empty`); `phalanx-direct`
(ordinary tensors, `phalanx.backend.direct_call`, which skips torch.distributed as the MPI figures do).
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

from contestants.contract import BoundCall, Contestant, NotOfferedError, Options


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
            "all_gather": partial(dist.all_gather_into_tensor, target, source),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, target, source),
            "all_to_all": partial(dist.all_to_all_single, target, source),
        }[op]

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()


class DirectContestant(TorchContestant):
    """A rank that calls Phalanx's core without `torch.distributed` in between."""

    def _call(self, op: str, target: Tensor, source: Tensor) -> Callable[[], object]:
        from phalanx import backend

        direct_call = getattr(backend, "direct_call", None)
        if direct_call is None:
            raise NotOfferedError("this phalanx has no phalanx.backend.direct_call")
        call: Callable[[], object] = direct_call(op, target, source)
        return call


def connect(rank: int, world_size: int, max_count: int, options: Options) -> Contestant:
    """Join the default group of the variety's backend over a store that is a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(options.meeting_place) / "store"), world_size)
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
    if variety != "phalanx-arena":
        return torch.zeros(count)
    import phalanx

    return phalanx.shared_empty(count, dtype=torch.float32).zero_()
