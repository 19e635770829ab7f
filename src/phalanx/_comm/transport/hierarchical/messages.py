"""Send and receive between ranks over the engine, even on one host, so that a receive from any rank waits in one place.

A message is sent as two engine messages: a header (bytes, dtype), then the elements. The engine would report a wrong
size as a broken connection; the header distinguishes the two cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._base.dtypes import dtype_name, dtype_of
from phalanx._comm.diagnostics.failure_report import FailedOperation, FailureReport, RankCall, closed
from phalanx._comm.transport.background import WHOLE_BYTES, look_at
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.call import describe_call
from phalanx._comm.transport.hierarchical.rails import ConnectionBroken, RailMessage, as_connection_broken
from phalanx._comm.transport.hierarchical.session import HierarchicalSession
from phalanx._comm.transport.tensors import alias, dense, nbytes, write_back


class HierarchicalMessages:
    """`HierarchicalMessages` sends and receives for one rank. Messages between two ranks keep their order per tag."""

    def __init__(self, session: HierarchicalSession) -> None:
        self._session = session

    def send(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> None:
        """Send `tensor`, and return when its memory may be reused. This may wait for the matching receive."""
        self._check_open(f"send to rank {dst}", tag, ctx)
        data = dense(alias(tensor))
        header = torch.tensor([nbytes(data), dtype_of(data.dtype).code], device="cpu")
        deadline = Deadline.after(ctx.timeout_s)
        here = self._operation(f"send to rank {dst}", ctx)
        with (
            self._session.recorded(describe_call("send", data, self._session.place(ctx)), ctx, dst),
            self._session.reporting(here, ctx, deadline, dst),
        ):
            messages = []
            with as_connection_broken(dst):
                messages.append(RailMessage(self._session.engine.send(dst, header, tag), dst, deadline))
                if nbytes(data):
                    messages.append(RailMessage(self._session.engine.send(dst, data, tag), dst, deadline))
            self._wait_for(messages, dst, nbytes(data))

    def recv(self, tensor: Tensor, src: int, tag: int, ctx: CallContext) -> int:
        """Receive into `tensor` the next message from `src` (if below zero, any rank) with `tag`; return its sender."""
        self._check_open(f"recv from rank {src}" if src >= 0 else "recv from any rank", tag, ctx)
        data = dense(alias(tensor))
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        deadline = Deadline.after(ctx.timeout_s)
        here = self._operation(f"recv from rank {src}" if src >= 0 else "recv from any rank", ctx)
        recorded = self._session.recorded(describe_call("recv", data, self._session.place(ctx)), ctx, src)
        with recorded, self._session.reporting(here, ctx, deadline, src), torch.no_grad():
            with as_connection_broken(src):
                if src >= 0:
                    RailMessage(self._session.engine.recv(src, header, tag), src, deadline).wait()
                    source = src
                else:
                    pending = self._session.engine.recv_any(header, tag)
                    RailMessage(pending, src, deadline).wait()
                    source = pending._source_rank()
            sent_bytes, sent_dtype = header.tolist()
            code = dtype_of(data.dtype).code
            if (sent_bytes, sent_dtype) != (nbytes(data), code):
                self._refuse(here, source, (sent_bytes, sent_dtype), (nbytes(data), code))
            if sent_bytes:
                with as_connection_broken(source):
                    message = RailMessage(self._session.engine.recv(source, data, tag), source, deadline)
                self._wait_for([message], source, sent_bytes)
            if data.data_ptr() != tensor.data_ptr():
                write_back(alias(tensor), data)
        return source

    def _wait_for(self, messages: Sequence[RailMessage], peer: int, num_bytes: int) -> None:
        """Wait for a message with `peer`, and detect a closed connection even in the middle of the message.

        Gloo reports a closed connection only for a message that has not begun to arrive. So another thread waits for a
        long message.
        """

        def wait() -> None:
            for message in messages:
                message.wait()

        if self._session.engine.is_interruptible or num_bytes <= WHOLE_BYTES:
            wait()
        else:
            self._session.background_messages.run(
                wait, look_at(self._session.engine, peer, partial(ConnectionBroken, peer))
            )

    def _operation(self, label: str, ctx: CallContext) -> FailedOperation:
        return FailedOperation(label, self._session.group, self._session.rank, call_site=self._session.place(ctx))

    def _check_open(self, label: str, tag: int, ctx: CallContext) -> None:
        if self._session.closed:
            raise closed(self._session.group)
        if not 0 <= tag < (num_tags := self._session.engine.num_tags):
            raise ValueError(f"send and recv: tag must be in 0..{num_tags - 1} in a group across hosts, got {tag}")
        self._session.reports.check(self._operation(label, ctx))

    def _refuse(self, here: FailedOperation, source: int, sent: tuple[int, int], wanted: tuple[int, int]) -> None:
        calls = {
            source: RankCall(f"send of {sent[0]} bytes of {dtype_name(sent[1])} to rank {self._session.rank}"),
            self._session.rank: RankCall(f"recv of {wanted[0]} bytes of {dtype_name(wanted[1])} from rank {source}"),
        }
        self._session.reports.fail(here, lambda: FailureReport("mismatch", calls=calls, is_collective=False))
