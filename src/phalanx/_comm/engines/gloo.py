"""`GlooEngine` is Gloo, as PyTorch builds it in: TCP between hosts, CPU tensors, one connection per pair of ranks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from phalanx._base.deadline import Deadline
from phalanx._base.torch_names import find
from phalanx._comm.engines.delivery import await_delivery, open_sockets
from phalanx._comm.engines.engine import DATA, InTransit
from phalanx._comm.engines.gloo_addresses import GlooAddresses
from phalanx._comm.engines.gloo_device import GlooDevice, gloo_device

c10d: Any = dist.distributed_c10d  # its stubs lack what is used here
_Options: Any = find(
    "torch.distributed.ProcessGroupGloo._Options", loses="ranks of several hosts do not reach each other through Gloo"
)

# No rank sends with this tag: one that receives with it learns only that time is up. See `GlooEngine.close`.
NOBODYS_TAG = 0x7FFFFFFF
# torch's stub knows only some of what the class has.
_ProcessGroupGloo: Any = ProcessGroupGloo
_PORT_OF_NOTHING = 9  # "discard": a route is looked up, nothing is sent


# Each collective is told in these.
_OPTIONS: dict[str, Any] = {
    "allreduce": c10d.AllreduceOptions,
    "reduce": c10d.ReduceOptions,
    "broadcast": c10d.BroadcastOptions,
    "gather": c10d.GatherOptions,
    "scatter": c10d.ScatterOptions,
    "_allgather_base": c10d.AllgatherOptions,
    "alltoall_base": c10d.AllToAllOptions,
}


class GlooEngine:
    """It carries messages between the ranks of a group, wherever they run. All ranks build theirs together.

    Sends and receives start at once and return something to wait for. Messages between two ranks with one tag arrive in
    the order in which they were sent; a receive is as long as its message, or longer. A wait that times out ends the
    engine for this rank, and its peers' waits with it.

    Arguments:
        num_threads: how many threads carry out what `begin` starts. Messages need none.

    Raises:
        RuntimeError: some rank cannot be reached within `timeout`.
    """

    name = "gloo"
    is_interruptible = False  # it waits in C++
    num_tags = DATA

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout: timedelta,
        *,
        address: str,
        interface: str = "",
        num_threads: int = 0,
    ) -> None:
        options = _Options()
        options._timeout = timeout
        self._device: GlooDevice | None = gloo_device(address, interface)
        options._devices = [self._device.device]
        options._threads = num_threads
        before = open_sockets()
        with self._device.connecting():
            # Gloo does not keep the Python half of a store.
            self._addresses = GlooAddresses(store, rank, world_size)
            self._group = _ProcessGroupGloo(self._addresses, rank, world_size, options)
        # Another thread's may be among them: they are only asked.
        self._sockets = {n: inode for n, inode in open_sockets().items() if before.get(n) != inode}
        self._nothing = torch.empty(1, dtype=torch.uint8)
        self.rank = rank
        self.world_size = world_size

    def send(self, dst: int, tensor: Tensor, tag: int) -> InTransit:
        pending: InTransit = self._group.send([tensor], dst, tag)
        return pending

    def recv(self, src: int, tensor: Tensor, tag: int) -> InTransit:
        """Start to receive into a contiguous tensor."""
        pending: InTransit = self._group.recv([tensor], src, tag)
        return pending

    def recv_any(self, tensor: Tensor, tag: int) -> Any:
        """Start to receive from the first rank that sends; after the wait, `_source_rank()` says which it was."""
        return self._group.recv_anysource([tensor], tag)

    def begin(
        self, method: str, arguments: Sequence[Any], timeout: timedelta, *, op: Any = None, root: int | None = None
    ) -> Any:
        """Start one of Gloo's own collectives, by c10d's name for it; return what to wait for."""
        options = _OPTIONS[method]()
        options.timeout = timeout
        if op is not None:
            options.reduceOp = op
        if root is not None:
            options.rootRank = root
        return getattr(self._group, method)(*arguments, options)

    def check(self, peer: int) -> None:
        """Raise RuntimeError if the connection with `peer` is gone. Call it rarely: each call leaves bytes behind."""
        self._group.recv([self._nothing], peer, NOBODYS_TAG)

    def deliver(self, deadline: Deadline) -> None:
        """Wait before `close` until what was sent has arrived, or time is up."""
        await_delivery(self._sockets, deadline)

    def close(self) -> None:
        """Close the connections at once: a thread that waits in them, here or at a peer, gets an error.

        Gloo has no call for that (`abort` wakes nobody in torch 2.13), but a wait that times out does it. One that
        fails at once, because its peer has closed before, does not: then another peer's must.
        """
        for offset in range(1, self.world_size):
            with contextlib.suppress(RuntimeError):
                peer = (self.rank + offset) % self.world_size
                self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, NOBODYS_TAG).wait(timedelta(milliseconds=1))

    def free(self) -> None:
        """Free the sockets and threads now, not when the garbage collector comes; this is the last call, after `close`.

        Do not call it after `begin`: Gloo's end waits for its collectives, and one in mid-message may never end.
        """
        self._group = _Freed()
        self._device = None


class _Freed:
    """It replaces Gloo's group: a thread that is late gets what it would get from a closed connection."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the connections of this group are closed")


def local_address(towards: str) -> str:
    """Return the address under which this host is known on the way to `towards`, by the routing table alone.

    Raises:
        OSError: there is no route, or no such name.
    """
    family, _, _, _, peer = socket.getaddrinfo(towards, _PORT_OF_NOTHING, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect(peer)
        return str(s.getsockname()[0])
