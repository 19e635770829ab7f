"""`Transport` is the interface between the process group and the code that carries its operations, with its contract.

    shared_memory   the ranks of one host                              memory that all of them map
    hierarchical    ranks on several hosts                             memory in each, an engine between
    gloo            ranks that can't share memory, or have no core     torch's Gloo

**Order.** All ranks call the same collectives of a group in the same order. Every one carries a fingerprint (sequence
number, operation, dtype, element count, root, reduction), which the ranks compare before a tensor changes. One
collective of a group runs at a time: a second thread waits for the first one's. Messages are outside of that order, and
keep an order of their own, per pair of ranks and tag.

**Blocking.** Everything here returns when the caller's tensors are done with; nothing is asynchronous. What is called
with `async_op=True` the process group gives to a thread of its own. Methods may be called from any thread.

**Deadlines.** Every call has one, in its `CallContext`; waiting for another thread's collective counts.

**Sizes.** Tensors are on the CPU, of any strides, and checked by the caller. They have one size on all ranks, except
the outputs of `gather` (outputs[r] is as large as rank r's tensor), the inputs of `reduce_scatter` (inputs[r] as rank
r's output) and those of `all_to_all` with `splits`; ranks that disagree about those sizes get a MismatchError, too. A
message is as long as the tensor that receives it.

**Numerics.** The same bits on every rank, and in every run of the same job.

**Errors**, and what has changed by then:

    MismatchError   the ranks called different things; on every rank   no tensor was changed (one message: its tensor)
    PeerLostError   a rank ended, left, or was interrupted             outputs hold undefined values, inputs their own
    DeadlineError   a rank did not come in time; it is named           the same
    ClosedError     this process has left, or was forked               nothing
    ValueError      a call that this transport cannot carry out        nothing

After any but the last two (and but a mismatch of a message's size with shared memory, which costs that message) the
group is over: all ranks hear the same cause, also those that come later.

**The end.** `close` leaves: all ranks that wait for this one hear it at once. Where operations of this process are
still inside, `leave_in_flight` wakes them first; `abandon` is for the end of the process, when nobody needs them to
end.
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
    """It says how long an operation may take, and where it was called.

    `timeout_s` seconds; `call_site` is the place in the rank's table.

    `awaited` is true if the caller waits for the operation, whichever thread carries it out.
    """

    __slots__ = ("awaited", "call_site", "timeout_ns", "timeout_s")

    def __init__(self, timeout_s: float, call_site: int) -> None:
        self.awaited = False
        self.timeout_s = timeout_s
        self.timeout_ns = timeout_ns(timeout_s)
        self.call_site = call_site


class Collectives(ABC):
    """It has the collectives that can be carried out where tensors lie, on the CPU or on a device."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, redop: int, ctx: CallContext, *, root: int = -1, factor: Any = None) -> None:
        """Reduce `tensor` over ranks in place, on all or only on `root`; multiply each input by `factor` first."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, ctx: CallContext) -> None:
        """Overwrite `tensor` on every rank with root's."""

    @abstractmethod
    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        """Write rank r's `tensor` to outputs[r], on every rank or only on `root`; elsewhere `outputs` is empty."""

    @abstractmethod
    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Write rank r's `tensor` to part r of `output`, which is split in world_size equal parts."""

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
        """Split `tensor` in equal parts, and write the reduction over ranks of this rank's part to `output`."""


class Transport(Collectives):
    """A transport is one rank's side of a group. `group` is its name in messages."""

    group: str
    rank: int
    world_size: int
    lock: threading.Lock
    """The lock that is held while a collective runs."""

    # -- what it can do ------------------------------------------------------------------------------------------

    is_interruptible = True
    """Whether its waits end with Ctrl-C. Else the main thread leaves them to another one."""

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks on each of several hosts; nothing where all are on one, or nobody knows."""
        return ()

    closes_in_flight = False
    """Whether `close` may come while operations of this process are inside: its memory stays until they are out."""

    eager_bytes = 256
    """The number of bytes a rank up to which an all_gather costs hardly more than its latency."""

    pickles: PickleAuthenticator | None = None
    """The authenticator of pickles between the group's ranks; it is None on one host."""

    ranks_share_memory = False
    """Whether all ranks map one memory. Then this is a `SharedMemoryTransport`, which can do more than is asked here:
    symmetric tensors, reductions of them in place, steps that go on without some ranks, posted receives.
    """

    def allocate_on_host(self, nbytes: int, ctx: CallContext) -> dict[int, Tensor]:
        """Allocate `nbytes` for each rank, and return the tensors of this host's ranks, by rank. All ranks call it.

        A rank writes its own and reads the others', which are there while it holds its own; what a rank has written
        outlives it. Where ranks share no memory, each has its own alone.
        """
        return {self.rank: torch.empty(nbytes, dtype=torch.uint8)}

    def precede(self, action: Callable[[Deadline], None]) -> None:
        """Call `action` in the next collective, before this rank takes part in it, where ranks are on several hosts.

        What it raises is the failure of the collective.
        """

    # -- where it is ---------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Return whether this process has left, or is a fork of the one that came."""

    @property
    @abstractmethod
    def seq(self) -> int:
        """Return how many collectives this rank has begun."""

    @abstractmethod
    def call_site(self, place: tuple[str, int]) -> int:
        """Return a number for a (file, line), as a `CallContext` takes it."""

    # -- the end -------------------------------------------------------------------------------------------------

    @abstractmethod
    def set_exit_reason(self, exit_reason: str) -> None:
        """Set how this process ends, in the words that the other ranks' errors will have."""

    @abstractmethod
    def leave_in_flight(self) -> None:
        """End the group while operations of this process still run, so that they wake up."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. All ranks that wait for this one hear it at once."""

    def abandon(self) -> None:
        """Do what `close` does with `closes_in_flight`, at the process's end: operations inside need not wake up."""
        self.close()

    def settle(self, patience_s: float) -> bool:
        """Return whether no thread of this process is in a collective, after at most `patience_s`."""
        if not self.lock.acquire(timeout=min(patience_s, threading.TIMEOUT_MAX)):
            return False
        self.lock.release()
        return True

    def interrupted(self, error: BaseException, *, what: str = "", peer: int = -1) -> None:
        """End the operation, whose waiting thread was interrupted. Transports need this where waits hear no signal.

        `what` describes a message with `peer`; if it is empty, the operation is the collective.
        """
        raise NotImplementedError

    # -- collectives ---------------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self, ctx: CallContext) -> None:
        """Return when every rank has come."""

    def sum_in_place(self, tensor: Tensor, code: int, timeout_s: float, place: tuple[str, int]) -> None:
        """Do what `all_reduce` does with SUM, for a contiguous tensor of this code's real dtype; this must be fast."""
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
        """Return when the bytes of `tensor` have left it."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int, tag: int, ctx: CallContext) -> int:
        """Receive into `tensor` the next message from `src` (if below zero, any rank) with `tag`; return its sender."""
