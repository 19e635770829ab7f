"""Step 2 of a collective: one slice, all-reduced (gathered, ...) between the ranks that hold it on each host."""

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
from phalanx.backend.across_hosts.wire import Widening, Wire
from phalanx.collectives import Links, Schedule, Topology, build, choose, play
from phalanx.collectives.algorithms import find, offering
from phalanx.collectives.schedule import Operation
from phalanx.deadline import Deadline
from phalanx.dtypes import dtype_of
from phalanx.engines.gloo import GlooEngine, Pending

TAG = 0x7FFFFFFE
_LONGEST_WAIT_S = 1e8  # three years: what a timeout of "for ever" becomes in milliseconds


class ConnectionBroken(Exception):
    """The engine could not finish a message with `peer`: it is gone or late, or the engine was closed."""

    def __init__(self, peer: int, said: str) -> None:
        super().__init__(said)
        self.peer = peer


@contextlib.contextmanager
def talking_to(peer: int) -> Iterator[None]:
    """What the engine raises inside is about `peer`."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionBroken(peer, str(error)) from error


def span_of(deadline: Deadline) -> timedelta:
    """What is left, for an engine's wait."""
    return timedelta(seconds=min(max(deadline.left_s, 0.001), _LONGEST_WAIT_S))


@dataclass(frozen=True)
class Message:
    """A message under way with `peer`."""

    pending: Pending | Widening
    peer: int
    deadline: Deadline

    def wait(self) -> None:
        """Return when it is done; raise ConnectionBroken if it can't be."""
        with talking_to(self.peer):
            self.pending.wait(span_of(self.deadline))


@lru_cache(maxsize=1024)
def plan(operation: Operation, num_hosts: int, log_bytes: int, root: int, algorithm: str | None) -> Schedule:
    """The schedule between hosts for slices of about 2**log_bytes bytes. The same on every rank.

    `algorithm` is used for the operations that it offers.
    """
    topology = Topology.flat(num_hosts)
    offered = algorithm is not None and find(algorithm) in offering(operation)
    chosen = choose(operation, 1 << log_bytes, topology, Links(), algorithm if offered else None).algorithm
    return build("ring" if chosen == "hierarchical" else chosen, operation, topology, root)


class Rail:
    """The ranks of one rail, by host. `run` is a collective of them."""

    def __init__(self, engine: GlooEngine, ranks: Sequence[int], host: int, algorithm: str | None, wire: Wire) -> None:
        self._engine = engine
        self._ranks = tuple(ranks)
        self._host = host
        self._algorithm = algorithm
        self._wire = wire

    def exchange(self, mine: Tensor, theirs: Sequence[Tensor | None], deadline: Deadline) -> None:
        """theirs[h] becomes what host h's rank of this rail sends all others; this host's own is None."""
        messages = []
        for host, rank in enumerate(self._ranks):
            into = theirs[host]
            if into is not None:
                with talking_to(rank):
                    messages.append(Message(self._engine.send(rank, mine, TAG), rank, deadline))
                    messages.append(Message(self._engine.recv(rank, into, TAG), rank, deadline))
        for message in messages:
            message.wait()

    def run(
        self,
        operation: Operation,
        buffer: Tensor,
        deadline: Deadline,
        *,
        redop: int = -1,
        root: int = 0,
        bounds: Sequence[int] | None = None,
        key: int = 0,
    ) -> None:
        """Play this host's part of `operation` on `buffer`, in place. `key` names the tensor, for error feedback.

        Numerics: as the schedule's `order` says; bitwise equal on all ranks of the rail.

        Raises:
            ConnectionBroken: a peer is gone or late; `buffer` holds undefined values.
        """
        schedule = plan(operation, len(self._ranks), buffer.nbytes.bit_length(), root, self._algorithm)
        for _ in self.play(schedule, buffer, deadline, redop=redop, bounds=bounds, key=key):
            pass

    def play(
        self,
        schedule: Schedule,
        buffer: Tensor,
        deadline: Deadline,
        *,
        redop: int = -1,
        bounds: Sequence[int] | None = None,
        key: int = 0,
    ) -> Iterator[None]:
        """As `run` by `schedule`, step by step: see `phalanx.collectives.play`."""
        reduces = schedule.operation in ("all_reduce", "reduce_scatter")
        shorter = reduces and self._wire.rounds(buffer.dtype)
        lost = self._wire.begin(buffer, key=key) if shorter else None
        code = dtype_of(buffer.dtype).code

        def send(dst: int, view: Tensor) -> Message:
            rank = self._ranks[dst]
            if shorter:
                at = (view.data_ptr() - buffer.data_ptr()) // view.element_size()
                view = self._wire.shorten(view, None if lost is None else lost[at : at + view.numel()])
            with talking_to(rank):
                return Message(_Held(self._engine.send(rank, view, TAG), view), rank, deadline)

        def recv(src: int, view: Tensor) -> Message:
            rank = self._ranks[src]
            with talking_to(rank):
                if shorter:
                    short = self._wire.staging(view)
                    return Message(Widening(self._engine.recv(rank, short, TAG), short, view), rank, deadline)
                return Message(self._engine.recv(rank, view, TAG), rank, deadline)

        def combine(mine: Tensor, theirs: Tensor) -> None:
            at = mine.data_ptr()
            _core.reduce(at, (at, theirs.data_ptr()), mine.numel(), code, redop)

        return play(
            schedule,
            self._host,
            buffer,
            send=send,
            recv=recv,
            combine=combine,
            scratch=lambda n: torch.empty(n, dtype=buffer.dtype),
            bounds=bounds,
        )


class _Held:
    """A send, and the tensor that it reads: the engine does not keep it."""

    def __init__(self, pending: Any, tensor: Tensor) -> None:
        self._pending = pending
        self._tensor = tensor

    def wait(self, timeout: timedelta) -> None:
        self._pending.wait(timeout)
