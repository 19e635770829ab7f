"""Send and receive on one host: sends use a ring per pair of ranks, receives are posted and match messages."""

from __future__ import annotations

import math

from torch import Tensor

from phalanx import _core
from phalanx._base.core_numbers import OK, RECV, SEND
from phalanx._base.deadline import timeout_ns
from phalanx._base.dtypes import dtype_of
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.shared_memory.session import SharedMemorySession
from phalanx._comm.transport.tensors import dense, nbytes, write_back


class PostedReceive:
    """A posted receive matches a message by sender and tag, in the order of posting, whatever comes first.

    It is over once any thread of this rank that takes messages in has found its message, or its end.
    """

    def __init__(
        self, memory: SharedMemoryMessages, tensor: Tensor, src: int, tag: int, ctx: CallContext, *, handed_over: bool
    ) -> None:
        self._memory = memory
        self._tensor = tensor
        self._data = dense(tensor)
        self._peer = src
        self._ctx = ctx
        self.handle = _core.Receive()
        self.was_here = (
            memory.core.post(
                self.handle,
                self._data.data_ptr(),
                nbytes(self._data),
                src,
                tag,
                dtype_of(self._data.dtype).code,
                handed_over,
                ctx.timeout_ns,
                ctx.call_site,
                tensor.shape,
            )
            == OK
        )
        """Whether the message had come before."""

    @property
    def is_pending(self) -> bool:
        """Return whether its message has not come, and nothing has ended the wait for it."""
        return self.handle.status == _core.PENDING

    @property
    def source(self) -> int:
        """Return the rank that sent the message, once it is not pending."""
        return self.handle.source

    def conclude(self) -> None:
        """Give the tensor its message, or raise what went wrong. Called once, when the receive no longer pends.

        The tensor is let go: a group keeps its last few thousand receives (see PhalanxWork.settle).
        """
        tensor, data = self._tensor, self._data
        del self._tensor, self._data
        self._memory.check(self.handle.status, self._ctx, kind=RECV, peer=self._peer)
        if data is not tensor:
            write_back(tensor, data)


class SharedMemoryMessages(SharedMemorySession):
    """It has send, and receives that are posted. Messages between two ranks keep their order per tag."""

    def send(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> None:
        """Return when the bytes of `tensor` have left it."""
        data = dense(tensor)
        code = dtype_of(data.dtype).code
        self.check(
            self.core.send(data.data_ptr(), nbytes(data), dst, tag, code, ctx.timeout_ns, ctx.call_site, tensor.shape),
            ctx,
            kind=SEND,
            peer=dst,
        )

    def send_now(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> bool:
        """Do what `send` does if that needs no waiting, and return True; else do nothing and return False."""
        data = dense(tensor)
        code = dtype_of(data.dtype).code
        status = self.core.send_now(
            data.data_ptr(), nbytes(data), dst, tag, code, ctx.timeout_ns, ctx.call_site, tensor.shape
        )
        if status:
            self.check(status, ctx, kind=SEND, peer=dst)
        return status is not None

    def post(self, tensor: Tensor, src: int, tag: int, ctx: CallContext, *, handed_over: bool = False) -> PostedReceive:
        """Post a receive into `tensor` of the next message from `src` (below zero: any rank) with `tag`, at once.

        With `handed_over` the core's `take_ended` will have its handle, if it is pending now.
        """
        return PostedReceive(self, tensor, src, tag, ctx, handed_over=handed_over)

    def recv(self, tensor: Tensor, src: int, tag: int, ctx: CallContext) -> int:
        """Receive into `tensor` the next message from `src` (if below zero, any rank) with `tag`; return its sender."""
        receive = self.post(tensor, src, tag, ctx)
        while receive.is_pending:
            self.core.progress(receive.handle, timeout_ns(math.inf))  # up to the deadline with which it was posted
        receive.conclude()
        return receive.source
