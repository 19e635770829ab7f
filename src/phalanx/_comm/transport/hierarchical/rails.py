"""Reduce or broadcast slices of large tensors between hosts, over rails that each connect one rank of every host.

This is step 2 of the collectives in `segmented`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from phalanx import _core
from phalanx._base.deadline import Deadline
from phalanx._base.dtypes import dtype_of
from phalanx._base.malloc import keep_freed_memory
from phalanx._comm.engines.engine import DATA, Engine, PendingMessage, timedelta_of
from phalanx._comm.schedules import Link, Schedule, Topology, build, play
from phalanx._comm.schedules.algorithms import find, offering
from phalanx._comm.schedules.cost import ETHERNET, cheapest
from phalanx._comm.schedules.schedule import Operation
from phalanx._comm.transport.hierarchical.compression import Compression, Widening

# The tags in ascending order: users' messages (below DATA), data of collectives, messages that precede a collective.
_NUMBERS = 4000  # the maximum number of distinct streams in one collective


class ConnectionBroken(Exception):
    """The engine could not complete a message with `peer`: the peer is lost or late, or the engine was closed."""

    def __init__(self, peer: int, said: str) -> None:
        super().__init__(said)
        self.peer = peer


@contextlib.contextmanager
def as_connection_broken(peer: int) -> Iterator[None]:
    """Convert an engine error in this block to a `ConnectionBroken` for the error's `peer`, or else for this one."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionBroken(getattr(error, "peer", peer), str(error)) from error


@dataclass(frozen=True)
class RailMessage:
    """A `RailMessage` is a pending message with `peer`."""

    pending: PendingMessage | Widening
    peer: int
    deadline: Deadline

    def wait(self) -> None:
        """Wait until the message is complete; raise ConnectionBroken if it cannot be."""
        with as_connection_broken(self.peer):
            self.pending.wait(timedelta_of(self.deadline))


def data_tag(call: int, number: int) -> int:
    """Return the tag of a collective's `number`th stream of messages; `call` is a digest of the fingerprint.

    Ranks whose calls differ use different tags, so that no message is received by the wrong operation.
    """
    return DATA | (call & 0x3FFFF) << 12 | number % _NUMBERS


@lru_cache(maxsize=1024)
def plan(
    operation: Operation, num_hosts: int, log_bytes: int, root: int, algorithm: str | None, link: Link | None
) -> Schedule:
    """Return the schedule between hosts for slices of about 2**log_bytes bytes, which is the same on every rank.

    `algorithm` is used if it supports `operation`; `link` describes the network to the cost model.
    """
    topology = Topology.flat(num_hosts)
    offered = algorithm is not None and find(algorithm) in offering(operation)
    if operation == "all_reduce" and num_hosts == 2 and not offered:
        # Doubling sends as many bytes as the ring, but in one step, without waiting for received data. Its additions
        # are twice the ring's, which the cost model counts although the pipeline hides them behind the transfers.
        return build("doubling", operation, topology)
    if algorithm is None or not offered:
        algorithm = cheapest(operation, 1 << log_bytes, num_hosts, link or ETHERNET)
    return build("ring" if algorithm == "hierarchical" else algorithm, operation, topology, root)


class Rail:
    """A `Rail` connects one rank of each host; `play` runs a collective among these ranks."""

    def __init__(
        self,
        engine: Engine,
        ranks: Sequence[int],
        host: int,
        algorithm: str | None,
        compression: Compression,
        link: Link | None = None,
    ) -> None:
        self._engine = engine
        self._ranks = tuple(ranks)
        self._host = host
        self._algorithm = algorithm
        self._compression = compression
        self._link = link
        keep_freed_memory()  # each large operation allocates and frees scratch memory

    def play(
        self,
        schedule: Schedule,
        buffer: Tensor,
        deadline: Deadline,
        *,
        tag: int,
        redop: int = -1,
        key: int = 0,
    ) -> Iterator[None]:
        """Run `schedule` on `buffer`, in place, step by step, as `schedules.play` does; all its messages have `tag`.

        `buffer` is scratch: it may be written before the ranks of the rail have agreed. `key` identifies the tensor for
        error feedback.

        Numerics: in the schedule's `order`; bitwise equal on all ranks of the rail.

        Raises:
            ConnectionBroken: a peer is lost or late; `buffer` holds undefined values.
        """
        shorter = self._compression.rounds(buffer.dtype, redop)
        lost: Tensor | None = None
        code = dtype_of(buffer.dtype).code

        def send(dst: int, view: Tensor) -> RailMessage:
            rank = self._ranks[dst]
            if shorter:
                at = (view.data_ptr() - buffer.data_ptr()) // view.element_size()
                view = self._compression.shorten(view, None if lost is None else lost[at : at + view.numel()])
            with as_connection_broken(rank):
                return RailMessage(PendingSend(self._engine.send(rank, view, tag), view), rank, deadline)

        def recv(src: int, view: Tensor) -> RailMessage:
            rank = self._ranks[src]
            with as_connection_broken(rank):
                if shorter:
                    short = self._compression.staging(view)
                    return RailMessage(Widening(self._engine.recv(rank, short, tag), short, view), rank, deadline)
                return RailMessage(self._engine.recv(rank, view, tag), rank, deadline)

        def combine(into: Tensor, first: Tensor, second: Tensor) -> None:
            _core.reduce(into.data_ptr(), (first.data_ptr(), second.data_ptr()), into.numel(), code, redop)

        steps = play(
            schedule,
            self._host,
            buffer,
            send=send,
            recv=recv,
            combine=combine,
            scratch=lambda n: torch.empty(n, dtype=buffer.dtype, device="cpu"),
        )
        next(steps)
        yield
        if shorter:  # from now on the buffer holds this host's data
            lost = self._compression.begin(buffer, key=key)
        yield from steps


class PendingSend:
    """A `PendingSend` is a pending send or receive that keeps its tensor alive, which the engine does not."""

    def __init__(self, pending: Any, tensor: Tensor) -> None:
        self._pending = pending
        self._tensor = tensor

    def wait(self, timeout: timedelta) -> None:
        self._pending.wait(timeout)
