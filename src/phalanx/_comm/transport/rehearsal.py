"""A replacement rank builds its model in a rehearsal, a group without other ranks, before it joins the training ranks.

Constructors (of DistributedDataParallel, of optimizers) call collectives that the other ranks called long ago. In a
rehearsal each collective returns at once, with the result that it would have if every rank passed this rank's data. The
training state that is loaded later overwrites what the constructors received, but perhaps not what the script's own
collectives received; those therefore log a warning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._base.core_numbers import BXOR, PRODUCT, SUM
from phalanx._base.log import get_logger, warn_once
from phalanx._comm.diagnostics.call_sites import find_script_call, short
from phalanx._comm.transport.base import CallContext, Transport
from phalanx.errors import PhalanxError

_logger = get_logger(__name__)


class RehearsalTransport(Transport):
    """A `RehearsalTransport` is rank `rank` of `world_size` without the other ranks; no operation waits."""

    closes_in_flight = True

    def __init__(self, group: str, rank: int, world_size: int) -> None:
        self.group = group
        self.rank = rank
        self.world_size = world_size
        self.lock = threading.Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def seq(self) -> int:
        """Return 0: nothing is counted."""
        return 0

    def call_site(self, place: tuple[str, int]) -> int:
        """Return 0: there is no table."""
        return 0

    def set_exit_reason(self, exit_reason: str) -> None:
        """Do nothing: no other rank waits for this one."""

    def leave_in_flight(self) -> None:
        """Do nothing: no operation is running."""

    def close(self) -> None:
        self._closed = True

    def barrier(self, ctx: CallContext) -> None:
        """Return at once."""

    def _check_script(self, source: int = -1) -> None:
        """Warn once if the script itself called the operation, unless its result is this rank's data (as `source`).

        Raises:
            PhalanxError: the operation receives objects, whose sizes this rank cannot know.
        """
        call = None if source == self.rank else find_script_call()
        if call is None:
            return
        place = f"{call.function} at {short(call.file)}:{call.line} in group {self.group!r} on rank {self.rank}"
        text = f"{place}: this process replaces a lost rank, and joins the other ranks in `phalanx.elastic.run`"
        if call.function.endswith("object_list"):
            raise PhalanxError(
                f"{text}; no other rank sends before that.\nMake this call once, inside the function that `run` "
                "decorates, and keep the result in State."
            )
        warn_once(
            _logger,
            f"{text}. Until then, the call uses this rank's data in place of theirs. Make this call inside the "
            "function that `run` decorates, unless State has the result, which then comes from a survivor.",
        )

    def all_reduce(self, tensor: Tensor, redop: int, ctx: CallContext, *, root: int = -1, factor: Any = None) -> None:
        """Reduce `world_size` copies of `tensor`."""
        if root in (-1, self.rank):
            self._check_script()
            tensor.detach().copy_(self._reduced(tensor.detach(), redop, factor))

    def _reduced(self, tensor: Tensor, redop: int, factor: Any) -> Tensor:
        data = tensor if factor is None else tensor * factor
        if redop == SUM:
            return data * self.world_size
        if redop == PRODUCT:
            return data**self.world_size
        if redop == BXOR and self.world_size % 2 == 0:
            return torch.zeros_like(data)
        return data

    def broadcast(self, tensor: Tensor, root: int, ctx: CallContext) -> None:
        """Leave `tensor` as it is, as if root had the same data."""
        self._check_script(root)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        """Write `tensor` to each of `outputs` that has its shape."""
        if outputs:
            self._check_script()
        for output in outputs:
            if output.shape == tensor.shape:
                output.detach().copy_(tensor.detach())

    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Write `tensor` to every part of `output`."""
        self._check_script()
        output.detach().copy_(torch.cat([tensor.detach().reshape(-1)] * self.world_size).view(output.shape))

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        """Write this rank's input to `output`, if this rank has inputs."""
        self._check_script(root)
        if inputs:
            output.detach().copy_(inputs[self.rank].detach())

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Write the reduction of `world_size` copies of this rank's part to `output`."""
        self._check_script()
        output.detach().copy_(self._reduced(inputs[self.rank].detach(), redop, factor))

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Write the reduction of `world_size` copies of this rank's part to `output`."""
        self._check_script()
        part = tensor.detach().reshape(self.world_size, -1)[self.rank].view(output.shape)
        output.detach().copy_(self._reduced(part, redop, factor))

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ctx: CallContext, *, splits: bool
    ) -> None:
        """Write this rank's part to each output that has its shape, as if every rank had sent it."""
        self._check_script()
        for output in outputs:
            if output.shape == inputs[self.rank].shape:
                output.detach().copy_(inputs[self.rank].detach())

    def all_to_all_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Write this rank's part to each part of `output`, as if every rank had sent it."""
        self._check_script()
        part = tensor.detach().reshape(self.world_size, -1)[self.rank]
        output.detach().copy_(torch.cat([part] * self.world_size).view(output.shape))

    def send(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> None:
        """Return at once."""

    def recv(self, tensor: Tensor, src: int, tag: int, ctx: CallContext) -> int:
        """Refuse to receive, since no other rank sends.

        Raises:
            PhalanxError: always.
        """
        raise PhalanxError(
            f"recv in group {self.group!r} on rank {self.rank}: this process replaces a lost rank, and joins the other "
            "ranks in `phalanx.elastic.run`; no other rank sends before that.\nReceive messages inside the function "
            "that `run` decorates."
        )


class RefusingTransport(RehearsalTransport):
    """A `RefusingTransport` cannot reach any peer; every operation raises when it looks up its call site.

    Arguments:
        explain: returns the error message for a call site, which is " at FILE:LINE" or "".
    """

    def __init__(self, group: str, rank: int, world_size: int, explain: Callable[[str], str]) -> None:
        super().__init__(group, rank, world_size)
        self._explain = explain

    def call_site(self, place: tuple[str, int]) -> int:
        """Raise the error for this call site.

        Raises:
            PhalanxError: always.
        """
        raise PhalanxError(self._explain(f" at {place[0]}:{place[1]}" if place[0] else ""))
