"""`GlooEngine` is the Gloo that PyTorch includes: CPU tensors over TCP, with one connection per pair of ranks."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import socket
import stat
import struct
import sys
import termios
import threading
import weakref
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store

from phalanx._base.deadline import Deadline
from phalanx._base.torch_names import find
from phalanx._comm.control.wire import WRITE_ONCE
from phalanx._comm.engines.engine import DATA, PendingMessage
from phalanx._comm.engines.message_streams import MessageStreams, Place, StreamListener
from phalanx._comm.rendezvous.torch_store import base_of

c10d: Any = dist.distributed_c10d  # its stubs lack names used here
_Options: Any = find(
    "torch.distributed.ProcessGroupGloo._Options", loses="ranks on several hosts cannot connect through Gloo"
)

# No rank sends with this tag, so a receive with this tag can only fail. See `GlooEngine.close`.
NOBODYS_TAG = 0x7FFFFFFF
# torch's stub has only some of the class's methods.
_ProcessGroupGloo: Any = ProcessGroupGloo
_PORT_OF_NOTHING = 9  # "discard"; connecting a UDP socket only looks up a route, and sends nothing


# The class of the options of each collective that `begin` can start, by c10d's method name.
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
    """A `GlooEngine` sends messages between the ranks of a group, on any hosts. All ranks create theirs together.

    Sends and receives start at once and return a handle to wait for. Between two ranks, messages with the same tag
    arrive in order; a receive's tensor is at least as long as the message. A wait that times out closes all of this
    rank's connections, so that its peers' waits for this rank fail, too.

    Arguments:
        num_threads: the number of threads that run the collectives of `begin`; messages need none.
        stream_peers: the ranks with which this rank exchanges short messages; each of them names this rank, too.
        secret: a text that only the group's ranks have; it authenticates the connections with `stream_peers`.

    Raises:
        RuntimeError: some rank cannot be reached within `timeout`.
    """

    name = "gloo"
    is_interruptible = False  # waits are in C++
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
        stream_peers: Sequence[int] = (),
        secret: str = "",
    ) -> None:
        deadline = Deadline.after(timeout)
        options = _Options()
        options._timeout = timeout
        self._device: GlooDevice | None = gloo_device(address, interface)
        options._devices = [self._device.device]
        options._threads = num_threads
        before = _open_sockets()
        with contextlib.ExitStack() as stack:
            listener = None
            if stream_peers:
                listener = stack.enter_context(contextlib.closing(StreamListener(self._device.host or address)))
            stack.enter_context(self._device.connecting())
            # Gloo does not keep the Python half of a store alive.
            self._addresses = GlooAddresses(store, rank, world_size, listener.place if listener else None)
            self._group = _ProcessGroupGloo(self._addresses, rank, world_size, options)
            if listener is None:
                self.short_messages = MessageStreams({})
            else:
                places = self._addresses.places
                self.short_messages = listener.connect(rank, stream_peers, places, secret, deadline)
        # These may include another thread's sockets, which does no harm: the sockets are only queried.
        self._sockets = {n: inode for n, inode in _open_sockets().items() if before.get(n) != inode}
        self._nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        self._collective: Any = None  # the collective that was started last
        self.rank = rank
        self.world_size = world_size

    def send(self, dst: int, tensor: Tensor, tag: int) -> PendingMessage:
        pending: PendingMessage = self._group.send([tensor], dst, tag)
        return pending

    def recv(self, src: int, tensor: Tensor, tag: int) -> PendingMessage:
        """Start a receive into a contiguous tensor."""
        pending: PendingMessage = self._group.recv([tensor], src, tag)
        return pending

    def recv_any(self, tensor: Tensor, tag: int) -> Any:
        """Start a receive from the first rank that sends; after the wait, `_source_rank()` returns the rank."""
        return self._group.recv_anysource([tensor], tag)

    def begin(
        self, method: str, arguments: Sequence[Any], timeout: timedelta, *, op: Any = None, root: int | None = None
    ) -> Any:
        """Start the Gloo collective that c10d calls `method`, and return a handle to wait for."""
        options = _OPTIONS[method]()
        options.timeout = timeout
        if op is not None:
            options.reduceOp = op
        if root is not None:
            options.rootRank = root
        self._collective = getattr(self._group, method)(*arguments, options)
        return self._collective

    def check(self, peer: int) -> None:
        """Raise RuntimeError if the connection to `peer` is lost. Call this rarely: each call sends some bytes."""
        self._group.recv([self._nothing], peer, NOBODYS_TAG)

    def deliver(self, deadline: Deadline) -> None:
        """Wait until all sent data have arrived or the deadline has passed; called before `close`."""
        _await_delivery(self._sockets, deadline)

    def close(self) -> None:
        """Close the connections at once: waits for this rank's messages, here and at its peers, fail.

        Gloo has no call for this (`abort` wakes no thread in torch 2.13), but a wait that times out closes all
        connections. A wait for a peer that has already closed its connection fails at once, and closes nothing; so this
        waits for each peer in turn.
        """
        self.short_messages.shut_down()
        for offset in range(1, self.world_size):
            with contextlib.suppress(RuntimeError):
                peer = (self.rank + offset) % self.world_size
                self._group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, NOBODYS_TAG).wait(
                    timedelta(milliseconds=1)
                )

    def free(self) -> None:
        """Free the sockets and threads now, rather than at garbage collection. Call this last, after `close`.

        Gloo's destructor waits for its collectives, and an interrupted collective may never end. So nothing is freed if
        the last collective has not ended.
        """
        if self._collective is not None and not self._collective.is_completed():
            _unended.append(self._group)
        self.short_messages.close()
        self._group = _Freed()
        self._device = None


_unended: list[Any] = []  # Gloo groups whose last collective had not ended; they are never freed


class _Freed:
    """A `_Freed` replaces Gloo's group after `free`: a late call raises RuntimeError, as on a closed connection."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the connections of this group are closed")


def local_address(towards: str) -> str:
    """Return this host's address on the route to the host `towards`. Nothing is sent to that host.

    Raises:
        OSError: there is no route, or the name does not resolve.
    """
    family, _, _, _, peer = socket.getaddrinfo(towards, _PORT_OF_NOTHING, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect(peer)
        return str(s.getsockname()[0])


# The ranks of a group exchange Gloo's addresses in one round, instead of one request per pair of ranks.
#
#     every rank   set  addresses/<n>      = Gloo's record of this rank, and where it listens for short messages
#     rank 0       get  all of them        → set  addresses#once = all together
#     every rank   get  addresses#once     → Gloo's requests are then answered locally
#
# Gloo alone would look up every other rank: 2N requests from each of N ranks, for records of 8N bytes. The records are
# not parsed here; they consist mostly of numbers that increase by one, and compress well.

_EACH, _NUM_WRITTEN = "addresses/", "addresses"
_TOGETHER = f"addresses{WRITE_ONCE}"  # the relay of a host fetches such a key once for all ranks
_RUN = struct.Struct("<qI")
_WORD_BYTES = 8


class GlooAddresses(Store):
    """A `GlooAddresses` is the store in which one rank's Gloo finds the other ranks; `store` is the group's store.

    All `world_size` ranks use one, and each writes one value, with the `place` at which it listens for short messages.
    Cost: 3 requests to `store` per rank, 5 from rank 0.
    """

    def __init__(self, store: Any, rank: int, world_size: int, place: Place | None = None) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()
        self._place = place
        self._found: dict[str, bytes] | None = None  # the results of `compress`, keyed by Gloo's own keys
        self.places: dict[int, Place] = {}
        """Where other ranks listen for short messages, by rank, once their values have been fetched."""

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        text = json.dumps([key, b64encode(compress(data)).decode(), self._rank, self._place])
        base = base_of(self._store)
        if hasattr(base, "add_item"):  # together with other ranks of this host, where supported
            base.add_item(*(base.name_through(self._store, name) for name in (_NUM_WRITTEN, _EACH)), text)
        else:
            self._store.set(f"{_EACH}{self._rank}", text)

    def get(self, key: str) -> bytes:
        """Return another rank's value; wait until all ranks have written theirs."""
        return decompress(self._find_all(None)[key])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ranks have written."""
        self._find_all(timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether this rank has fetched the values of all ranks, and `keys` are among them."""
        return self._found is not None and all(key in self._found for key in keys)

    def _find_all(self, timeout: timedelta | None) -> dict[str, bytes]:
        with self._lock:
            if self._found is None:
                if self._rank == 0:
                    self._put_together(timeout)
                else:
                    self._wait([_TOGETHER], timeout)
                self._found, self.places = unpack_all(self._store.get(_TOGETHER))
            return self._found

    def _put_together(self, timeout: timedelta | None) -> None:
        keys = [f"{_EACH}{number}" for number in range(self._world_size)]  # not always the ranks' order
        self._wait(keys, timeout)
        self._store.set(_TOGETHER, pack_all(self._store.multi_get(keys)))

    def _wait(self, keys: list[str], timeout: timedelta | None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)


def pack_all(texts: Sequence[bytes]) -> bytes:
    """Pack the records of all ranks into one value."""
    return zlib.compress(b"[" + b",".join(texts) + b"]")


def unpack_all(data: bytes) -> tuple[dict[str, bytes], dict[int, Place]]:
    """Return the compressed record of each rank, by Gloo's key, and where ranks listen for short messages."""
    records = json.loads(zlib.decompress(data))
    places = {rank: (place[0], place[1]) for _, _, rank, place in records if place}
    return {key: b64decode(text) for key, text, _, _ in records}, places


def compress(data: bytes) -> bytes:
    """Compress the 8-byte words of `data` as runs of equal differences, followed by an incomplete last word, if any."""
    whole = len(data) // _WORD_BYTES * _WORD_BYTES
    words = torch.frombuffer(bytearray(bytes(_WORD_BYTES) + data[:whole]), dtype=torch.int64)
    values, counts = torch.unique_consecutive(torch.diff(words), return_counts=True)
    runs = b"".join(map(_RUN.pack, values.tolist(), counts.tolist()))
    return struct.pack("<I", len(values)) + runs + data[whole:]


def decompress(data: bytes) -> bytes:
    """Invert `compress`."""
    (num_runs,) = struct.unpack_from("<I", data)
    end = 4 + num_runs * _RUN.size
    runs = torch.tensor([*_RUN.iter_unpack(data[4:end])], dtype=torch.int64, device="cpu").reshape(-1, 2)
    words = torch.repeat_interleave(runs[:, 0], runs[:, 1]).cumsum(0)
    return ctypes.string_at(words.data_ptr(), len(words) * _WORD_BYTES) + data[end:]


# All Gloo groups of this process accept connections at one port.
#
#     a group's ranks connect     ──> the kernel accepts connections
#     no group is connecting      ──> the kernel drops all packets to the port
#
# Gloo accepts every connection as long as the process lives, and aborts the process if it runs out of descriptors. Gloo
# has no call to stop accepting, so a filter makes the kernel drop the packets (SO_ATTACH_FILTER of Linux). Existing
# connections are not affected.

# <asm-generic/socket.h> and <linux/filter.h>; Python's socket module does not name them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # a single instruction, BPF_RET|BPF_K: accept 0 bytes of each packet


class GlooDevice:
    """A `GlooDevice` is Gloo's listening port on one network interface, with its thread. See `gloo_device`."""

    def __init__(self, address: str, interface: str) -> None:
        before = _open_sockets()
        self.device = _create(address, interface)
        new = {
            descriptor: inode
            for descriptor, inode in _open_sockets().items()
            if before.get(descriptor) != inode and _place(descriptor, inode) is not None
        }
        # If there are several, another thread has opened some of them, and they must not be filtered.
        self._listening = new if len(new) == 1 else {}
        self._lock = threading.Lock()
        self._num_connecting = 0
        self._filter()

    @property
    def ports(self) -> list[tuple[str, int]]:
        """Return the addresses and ports at which the device listens; [] if they could not be identified."""
        places = (_place(descriptor, inode) for descriptor, inode in self._listening.items())
        return [place for place in places if place is not None]

    @property
    def host(self) -> str:
        """Return the address at which the device listens; "" if it could not be identified."""
        return next((host for host, _ in self.ports), "")

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Accept connections inside the block."""
        with self._lock:
            self._num_connecting += 1
            self._filter()
        try:
            yield
        finally:
            with self._lock:
                self._num_connecting -= 1
                self._filter()

    def _filter(self) -> None:
        """Make the kernel accept packets to the port if a group is connecting, and drop them otherwise."""
        if sys.platform != "linux":
            return
        for descriptor, inode in self._listening.items():
            # The socket may have no filter yet, or a sandbox may forbid filters.
            with contextlib.suppress(OSError), _socket_of(descriptor, inode) as listening:
                if self._num_connecting:
                    listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
                else:
                    drop = ctypes.create_string_buffer(_DROP, len(_DROP))
                    program = struct.pack("HL", 1, ctypes.addressof(drop))
                    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


# Keyed by process (a fork has none of its parent's threads), address and interface.
_known_devices: weakref.WeakValueDictionary[tuple[int, str, str], GlooDevice] = weakref.WeakValueDictionary()
_devices_lock = threading.Lock()


def gloo_device(address: str, interface: str) -> GlooDevice:
    """Return this process's device on `interface`, or else on the interface that has `address`.

    All callers share the device, which closes when its last reference is dropped.

    Raises:
        RuntimeError: there is no such address or interface on this host.
    """
    key = (os.getpid(), address, interface)
    with _devices_lock:
        device = _known_devices.get(key)
        if device is None:
            device = _known_devices[key] = GlooDevice(address, interface)
        return device


def _create(address: str, interface: str) -> Any:
    if not address and not interface:
        # The job's store is a file, which has no host: Gloo resolves this host's own name, or uses loopback.
        return _ProcessGroupGloo.create_default_device(lazy_init=False)
    named = {"interface": interface} if interface else {"hostname": address}
    return _ProcessGroupGloo.create_device(**named, lazy_init=False)


@contextlib.contextmanager
def _socket_of(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """Yield the socket with this descriptor, which Gloo owns.

    Raises:
        OSError: the descriptor is closed, or belongs to another file by now.
    """
    if os.fstat(descriptor).st_ino != inode:
        raise OSError("the descriptor now belongs to another file")
    same = socket.socket(fileno=descriptor)
    try:
        yield same
    finally:
        same.detach()


def _place(descriptor: int, inode: int) -> tuple[str, int] | None:
    """Return the address and port at which a TCP socket listens; None if it does not listen, or on all addresses."""
    try:
        with _socket_of(descriptor, inode) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            host, port = one.getsockname()[:2]
            return None if host in ("0.0.0.0", "::") else (str(host), int(port))  # Gloo binds to one address
    except OSError:
        return None


# Wait until all data sent by this process have reached the other hosts.
#
# Gloo closes its connections at once, and discards data that the kernel has not delivered yet. A peer behind a slow
# link, or a stopped peer, needs these data to complete an operation that is complete here.

_FOLDER = "/proc/self/fd"
_MOST_TRIED = 4096  # the number of descriptors to try if they cannot be listed
_POLL_S, _LONGEST_POLL_S = 0.0002, 0.02


def _open_sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets, by descriptor; empty if the system does not list them."""
    if sys.platform != "linux":
        return {}
    try:
        descriptors: Iterable[int] = map(int, os.listdir(_FOLDER))
    except OSError:  # no /proc
        descriptors = range(_MOST_TRIED)
    return {descriptor: inode for descriptor in descriptors if (inode := _inode(descriptor)) is not None}


def _await_delivery(sockets: dict[int, int], deadline: Deadline) -> bool:
    """Return True once the peers' hosts have acknowledged all data sent on these sockets; False after the deadline."""

    def is_delivered() -> bool:
        still_open = (descriptor for descriptor, inode in sockets.items() if _inode(descriptor) == inode)
        return not any(map(_unacknowledged, still_open))

    return deadline.wait_until(is_delivered, _POLL_S, _LONGEST_POLL_S)


def _inode(descriptor: int) -> int | None:
    """Return the inode of the socket with this descriptor; None if it is not a socket."""
    try:
        status = os.fstat(descriptor)
    except OSError:  # closed, perhaps just now
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _unacknowledged(descriptor: int) -> int:
    """Return the number of sent bytes that the peer has not acknowledged; 0 if there is no connection."""
    answer = struct.pack("i", 0)
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, answer))
    except OSError:
        return 0
    return int(count)
