"""A `DeviceCall` is one operation on device tensors, carried out on the device, on a stream beside the caller's.

the caller's stream   ── kernels ──┐                                            ┌── kernels that read the result
the copy stream                    └─▶ to this rank's area ─▶ · ─▶ from all areas ─┘
the host                                                      the ranks meet
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phalanx.transport.base import CallContext
from phalanx.transport.device_memory.collectives import DeviceCollectives
from phalanx.transport.staging.staged_call import Operation
from phalanx.transport.staging.streams import CopyStream


class DeviceCall:
    """It has the tensors of one operation, and says when the operation is over."""

    def __init__(self, stream: CopyStream, collectives: DeviceCollectives) -> None:
        self.stream = stream
        self.collectives = collectives
        self.outputs: list[Tensor] = []
        """The tensors that receive results."""
        self._done_mark: Any = None
        stream.follow_caller()

    def stage(self, tensor: Tensor, *, read: bool, written: bool) -> Tensor:
        """Return `tensor` itself, whose memory nobody else gets until the operation is over."""
        self.stream.keep(tensor)
        if written:
            self.outputs.append(tensor)
        return tensor

    def around(self, operation: Operation) -> Operation:
        """Return a function that queues `operation` on the stream."""

        def carry_out(ctx: CallContext) -> None:
            with self.stream.queueing():
                operation(ctx)
            self._done_mark = self.stream.mark()

        return carry_out

    def abandon(self) -> None:
        """Give up a call that was refused: nothing was queued."""

    def order_caller(self) -> None:
        """Let what the caller queues from now on come after the results; the host does not wait for them."""
        if self._done_mark is not None:
            self.stream.await_on_device(self._done_mark)
