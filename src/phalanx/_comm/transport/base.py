"""`Transport` is the interface between the process group and the code that runs its operations, with its contract.

    shared_memory   the ranks of one host                              memory that all of them map
    hierarchical    ranks on several hosts                             memory in each, an engine between
    gloo            ranks without shared memory or without the C core  torch's Gloo

**Order.** All ranks call the same collectives of a group in the same order. Every call has a fingerprint (sequence
number, operation, dtype, element count, root, reduction), which the ranks compare before any tensor changes. A group
runs one collective at a time: a call on a second thread waits for that of the first. Messages are ordered separately,
per pair of ranks and tag.

**Blocking.** A method returns only when it no longer uses the caller's tensors; nothing is asynchronous. The process
group runs `async_op=True` calls on its own thread. Methods may be called from any thread.

**Deadlines.** Every call has a timeout, in its `CallContext`, which also limits the wait for another thread's
collective.

**Sizes.** Tensors are on the CPU, have any strides, and were checked by the caller. They have the same size on all
ranks, except the outputs of `gather` (outputs[r] is as large as rank r's tensor), the inputs of `reduce_scatter`
(inputs[r] is as large as rank r's output) and those of `all_to_all` with `splits`; if ranks disagree about these sizes,
all raise a MismatchError. A message must be exactly as large as the tensor that receives it.

**Numerics.** Results are bitwise identical on every rank, and in every run of the same job.

**Errors**, and what has changed by then:

    MismatchError   the ranks' calls differ; raised on every rank      no tensor was changed
    PeerLostError   a rank ended, left, or was interrupted             outputs are undefined, inputs unchanged
    DeadlineError   a rank was late; the error names it                the same
    ClosedError     this process has left, or was forked               nothing
    ValueError      the transport does not support the call            nothing

After the first three errors the group has failed: all ranks report the same cause, also in later calls. There is one
exception: with shared memory, a message of the wrong size fails only that message.

**The end.** `close` leaves the group: all ranks that wait for this one are notified at once. If operations of this
process are still running, call `leave_in_flight` first, which wakes them. `abandon` is for the exit of the process,
when running operations need not end.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._base.core_numbers import SUM
from phalanx._base.deadline import Deadline, timeout_ns
from phalanx._comm.transport.authentication import PickleAuthenticator


class CallContext:
    """A `CallContext` has an operation's timeout and its call site in the program.

    `call_site` is the number of the file and line in the rank's table of call sites. `awaited` is True if the caller
    waits for the operation, even if another thread runs it.
    """

    __slots__ = ("awaited", "call_site", "timeout_ns", "timeout_s")

    def __init__(self, timeout_s: float, call_site: int) -> None:
        self.awaited = False
        self.timeout_s = timeout_s
        self.timeout_ns = timeout_ns(timeout_s)
        self.call_site = call_site


class Collectives(ABC):
    """`Collectives` are the collectives that can run on the tensors' own device, be it the CPU or an accelerator."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, redop: int, ctx: CallContext, *, root: int = -1, factor: Any = None) -> None:
        """Reduce `tensor` over ranks in place, on all ranks or on `root` only; multiply inputs by `factor` first."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, ctx: CallContext) -> None:
        """Overwrite `tensor` on every rank with root's."""

    @abstractmethod
    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        """Write rank r's `tensor` to outputs[r], on every rank or only on `root`; elsewhere `outputs` is empty."""

    @abstractmethod
    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Write rank r's `tensor` to part r of `output`, which is split into world_size equal parts."""

    @abstractmethod
    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        """Write root's inputs[rank] to `output`; on the other ranks `inputs` is empty."""

    @abstractmethod
    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Write the reduction over ranks of inputs[rank] to `output`; the inputs may differ in size."""

    @abstractmethod
    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Split `tensor` into equal parts, and write the reduction over ranks of this rank's part to `output`."""


class Transport(Collectives):
    """A `Transport` is one rank's side of a group. `group` is the group's name in messages to users."""

    group: str
    rank: int
    world_size: int
    lock: threading.Lock
    """The lock that a thread holds while it runs a collective."""

    # -- capabilities --------------------------------------------------------------------------------------------

    is_interruptible = True
    """Whether Ctrl-C ends the transport's waits. If not, another thread waits instead of the main thread."""

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each host; empty if all ranks are on one host, or if the hosts are unknown."""
        return ()

    closes_in_flight = False
    """Whether `close` may be called during operations of this process: the memory stays mapped until they end."""

    eager_bytes = 256
    """The bytes per rank up to which an all_gather costs little more than its latency."""

    pickles: PickleAuthenticator | None = None
    """The authenticator of pickles between the group's ranks; it is None on one host."""

    ranks_share_memory = False
    """Whether all ranks map the same memory. If so, this is a `SharedMemoryTransport`, with additional features:
    symmetric tensors, in-place reductions of them, broadcasts that do not wait for all ranks, posted receives.
    """

    def allocate_on_host(self, nbytes: int, ctx: CallContext) -> dict[int, Tensor]:
        """Allocate `nbytes` for each rank, and return the tensors of this host's ranks, by rank. All ranks call this.

        A rank may write its own tensor, and read the others for as long as it keeps its own. The data outlive the rank
        that wrote them. If the ranks of a host do not share memory, each gets only its own tensor.
        """
        return {self.rank: torch.empty(nbytes, dtype=torch.uint8, device="cpu")}

    def precede(self, action: Callable[[Deadline], None]) -> None:
        """Call `action` in the next collective, before this rank joins it, if ranks are on several hosts.

        An exception of `action` fails the collective.
        """

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Return whether this process has left, or is a fork of the process that joined."""

    @property
    @abstractmethod
    def seq(self) -> int:
        """Return the number of collectives that this rank has begun."""

    @abstractmethod
    def call_site(self, place: tuple[str, int]) -> int:
        """Return the number of a (file, line) for a `CallContext`."""

    # -- the end -------------------------------------------------------------------------------------------------

    @abstractmethod
    def set_exit_reason(self, exit_reason: str) -> None:
        """Set how this process ends, as text for the other ranks' errors."""

    @abstractmethod
    def leave_in_flight(self) -> None:
        """End the group while operations of this process are still running, so that they wake up and fail."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. All ranks that wait for this one are notified at once."""

    def abandon(self) -> None:
        """Close the group at the end of the process, without waking operations that still run."""
        self.close()

    def settle(self, patience_s: float) -> bool:
        """Wait at most `patience_s`, and return whether no thread of this process is in a collective."""
        if not self.lock.acquire(timeout=min(patience_s, threading.TIMEOUT_MAX)):
            return False
        self.lock.release()
        return True

    def interrupted(self, error: BaseException, *, what: str = "", peer: int = -1) -> None:
        """End the operation for which an interrupted thread waits, if the transport's waits ignore signals.

        `what` describes a message with `peer`; if it is empty, the operation is the collective.
        """
        raise NotImplementedError

    # -- collectives ---------------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self, ctx: CallContext) -> None:
        """Wait until every rank has called this."""

    def sum_in_place(self, tensor: Tensor, code: int, timeout_s: float, place: tuple[str, int]) -> None:
        """Run `all_reduce` with SUM on a contiguous tensor of the real dtype with number `code`: the fast path."""
        self.all_reduce(tensor, SUM, CallContext(timeout_s, self.call_site(place)))

    @abstractmethod
    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ctx: CallContext, *, splits: bool
    ) -> None:
        """Write rank r's inputs[rank] to outputs[r]; with `splits` sizes may differ, and are compared across ranks."""

    @abstractmethod
    def all_to_all_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Exchange the equal parts of two contiguous tensors as `all_to_all` does."""

    # -- point to point ------------------------------------------------------------------------------------------

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> None:
        """Send `tensor`, and return when its memory may be reused."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int, tag: int, ctx: CallContext) -> int:
        """Receive into `tensor` the next message from `src` (if below zero, any rank) with `tag`; return its sender."""
