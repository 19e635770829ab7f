"""Run collectives of large tensors with the engine's own collectives, if no two ranks share a host.

A host with one rank has nothing to reduce in shared memory: the ranks agree, and the engine runs the collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._comm.engines.engine import Engine, timedelta_of
from phalanx._comm.engines.gloo import GlooEngine
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.call import CollectiveCall
from phalanx._comm.transport.gloo.numerics import is_reducible, operation_of, result_of, summand
from phalanx._comm.transport.hierarchical.agreement import Agreement
from phalanx._comm.transport.hierarchical.rails import ConnectionBroken
from phalanx._comm.transport.numerics import sum_dtype
from phalanx._comm.transport.tensors import dense, flat, scaled, write_back


class EngineCollectives:
    """`EngineCollectives` run the engine's own collectives, each after an agreement on its `call`."""

    def __init__(self, agreement: Agreement, engine: GlooEngine) -> None:
        self._agreement = agreement
        self._session = agreement.session
        self._engine = engine

    @classmethod
    def of(cls, agreement: Agreement, engine: Engine) -> EngineCollectives | None:
        """Return the engine's collectives; None if ranks share a host, the engine has none, or options name others."""
        session = agreement.session
        is_alone = session.layout.has_one_rank_each and session.options.algorithm is None
        return cls(agreement, engine) if is_alone and isinstance(engine, GlooEngine) else None

    def reduces(self, dtype: torch.dtype, redop: int) -> bool:
        """Return whether the engine has this reduction, and sums are not rounded between hosts."""
        return is_reducible(redop, dtype) and not self._session.compression.rounds(sum_dtype(dtype, redop), redop)

    def all_reduce(
        self, tensor: Tensor, call: CollectiveCall, redop: int, ctx: CallContext, *, root: int, factor: Any
    ) -> None:
        wanted = root in (-1, self._session.rank)
        with self._session.running(call, ctx) as deadline, torch.no_grad():
            self._agreement.agree(ctx, deadline)
            data = dense(scaled(tensor, factor))
            total = summand(data, redop, is_scratch=wanted or data is not tensor)
            units: dict[str, Any] = {"op": operation_of(redop, data.dtype)}
            if root >= 0:
                units["root"] = root
            self._run("allreduce" if root < 0 else "reduce", total, call, ctx, deadline, **units)
            if wanted:
                result = result_of(total, data, redop, self._session.world_size)
                if result.data_ptr() != tensor.data_ptr():
                    write_back(tensor, result)
                else:
                    result[:0].zero_()  # increment the tensor's version counter: Gloo wrote to its memory

    def broadcast(self, tensor: Tensor, call: CollectiveCall, root: int, ctx: CallContext) -> None:
        with self._session.running(call, ctx) as deadline:
            self._agreement.agree(ctx, deadline)
            data = dense(tensor)
            self._run("broadcast", flat(data).view(torch.uint8), call, ctx, deadline, root=root)
            if root != self._session.rank:
                write_back(tensor, data)

    def _run(
        self, method: str, data: Tensor, call: CollectiveCall, ctx: CallContext, deadline: Deadline, **units: Any
    ) -> None:
        """Run one of the engine's collectives on `data`, in place."""
        with self._talking():
            pending = self._engine.begin(method, [[data]], timedelta_of(deadline), **units)
        self._session.wait_until(pending.is_completed, call, ctx)
        with self._talking():
            pending.wait()

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Convert an engine error in this block to a `ConnectionBroken`."""
        try:
            yield
        except RuntimeError as error:
            raise ConnectionBroken(self._find_lost(), str(error)) from error

    def _find_lost(self) -> int:
        """Return a rank whose connection is lost; Gloo does not report which connection made its collective fail."""
        others = [rank for rank in range(self._session.world_size) if rank != self._session.rank]
        for peer in others:
            try:
                self._engine.check(peer)
            except RuntimeError:
                return peer
        return others[0]
