"""Exchange one message between the hosts' leaders at the start of every collective, before any large data move.

The message has the headers ("heads") of the ranks' calls and, if the tensors are small, also their data.

    leader of host A  ──heads of A's ranks, payload──>  leader of host B      (and the other way, at the same time)

A collective of small tensors costs only this message between hosts, each way. A message contains its length, so that an
unexpected message (another operation, another size) still arrives, and is reported as a mismatch. With more than three
hosts, leaders forward each other's messages: see `bruck`.
"""

from __future__ import annotations

import abc
import ctypes
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from phalanx._base.deadline import Deadline
from phalanx._comm.engines.engine import ShortMessages
from phalanx._comm.transport.call import HEAD_BYTES, agree
from phalanx._comm.transport.hierarchical.layout import Layout
from phalanx._comm.transport.hierarchical.rails import as_connection_broken

# The maximum number of bytes that a leader sends to (or receives from) all other hosts together, in an operation that
# sends its data with the heads.
SMALL_BYTES = 2**18
ALWAYS_SMALL_BYTES = 256  # sums up to this size are sent with the heads, whatever the options and the number of hosts
_PREFIX = struct.Struct("<II")  # the number of distinct heads, and the payload's length in bytes
_ALIGNED = 64


class HostMessage(NamedTuple):
    """A `HostMessage` has another host's `heads`, in rank order, and its payload, until the next operation begins."""

    heads: Sequence[bytes]
    address: int
    nbytes: int


class MessageBuffer:
    """A `MessageBuffer` is memory for one message."""

    def __init__(self, nbytes: int) -> None:
        self._tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.address = self._tensor.data_ptr()
        self.bytes = memoryview((ctypes.c_char * nbytes).from_address(self.address)).cast("B")


class LeaderExchange(abc.ABC):
    """A `LeaderExchange` exchanges messages between this host's leader and the others. Only leaders have one.

    `send` and `receive` alternate, and each is called once per operation.
    """

    is_direct: bool
    """Whether each host sends a separate message to each other host. If not, all other hosts get the same payload."""

    def __init__(self, messages: ShortMessages, layout: Layout) -> None:
        self.messages = messages
        self.hosts = tuple(host for host in range(layout.num_hosts) if host != layout.host)
        self._scratch = MessageBuffer(SMALL_BYTES)
        self.scratch = self._scratch.address  # where the leader combines the payloads of its own host

    @abc.abstractmethod
    def send(self, heads: Sequence[bytes], payloads: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Start sending to every other host the heads of this host's ranks and `payloads[host]`: (address, length)."""

    @abc.abstractmethod
    def receive(self, deadline: Deadline) -> dict[int, HostMessage]:
        """Return the message of each other host in this operation; it is valid until the next `receive`.

        Raises:
            ConnectionBroken: some host's leader is lost or late.
        """


class DirectExchange(LeaderExchange):
    """A `DirectExchange` sends one message per operation to the leader of each other host."""

    is_direct = True

    def __init__(self, messages: ShortMessages, layout: Layout) -> None:
        super().__init__(messages, layout)
        hosts = layout.topology.hosts
        self._peers = {host: hosts[host][0] for host in self.hosts}
        self._sizes = {host: len(hosts[host]) for host in self.hosts}
        self._outbox = MessageBuffer(longest_message(len(layout.local_ranks), SMALL_BYTES))
        self._inboxes = {host: MessageBuffer(longest_message(self._sizes[host], SMALL_BYTES)) for host in self.hosts}

    def send(self, heads: Sequence[bytes], payloads: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        for host, peer in self._peers.items():
            nbytes = write_message(self._outbox, heads, payloads.get(host, ()))
            with as_connection_broken(peer):
                self.messages.send(peer, self._outbox.bytes[:nbytes])

    def receive(self, deadline: Deadline) -> dict[int, HostMessage]:
        found = {}
        for host, peer in self._peers.items():
            inbox = self._inboxes[host]
            with as_connection_broken(peer):
                self.messages.receive(peer, inbox.bytes, deadline)
            found[host] = read_message(inbox, 0, self._sizes[host])[0]
        with as_connection_broken(peer):
            self.messages.flush(deadline)
        return found


def all_agree(mine: bytes, *hosts: Sequence[bytes]) -> bool:
    """Return whether every rank of these hosts made the same call as `mine`."""
    return all([head is mine or agree(mine, head) for heads in hosts for head in heads])


# -- a host's message: two numbers, the index of each rank's head, the distinct heads, the payload ---------------------


def write_message(buffer: MessageBuffer, heads: Sequence[bytes], pieces: Sequence[tuple[int, int]]) -> int:
    """Write a host's message to the beginning of `buffer`, and return its length."""
    distinct = list(dict.fromkeys(heads))
    kinds = bytes([distinct.index(head) for head in heads])
    start = end = _payload_offset(len(heads), len(distinct))
    for address, nbytes in pieces:
        ctypes.memmove(buffer.address + end, address, nbytes)
        end += nbytes
    buffer.bytes[:start] = b"".join((_beginning(len(distinct), end - start, kinds), *distinct))
    return end


@lru_cache(maxsize=1024)
def _beginning(num_distinct: int, nbytes: int, kinds: bytes) -> bytes:
    """Return the part of a message before its heads."""
    return (_PREFIX.pack(num_distinct, nbytes) + kinds).ljust(_payload_offset(len(kinds), 0), b"\0")


def read_message(buffer: MessageBuffer, at: int, num_ranks: int) -> tuple[HostMessage, int]:
    """Return the message at offset `at` from a host with `num_ranks` ranks, and the offset of the next message."""
    num_distinct, nbytes = _PREFIX.unpack_from(buffer.bytes, at)
    start = at + _payload_offset(num_ranks, num_distinct)
    first = start - num_distinct * HEAD_BYTES
    distinct = [bytes(buffer.bytes[begin : begin + HEAD_BYTES]) for begin in range(first, start, HEAD_BYTES)]
    kinds = buffer.bytes[at + _PREFIX.size : at + _PREFIX.size + num_ranks]
    return HostMessage([distinct[kind] for kind in kinds], buffer.address + start, nbytes), aligned(start + nbytes)


def longest_message(num_ranks: int, payload_bytes: int) -> int:
    """Return the maximum length of a message from a host with `num_ranks` ranks, in bytes."""
    return _payload_offset(num_ranks, num_ranks) + payload_bytes


def aligned(nbytes: int) -> int:
    """Return the first offset from `nbytes` on at which a message may begin."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


@lru_cache(maxsize=1024)
def _payload_offset(num_ranks: int, num_distinct: int) -> int:
    return aligned(_PREFIX.size + num_ranks) + num_distinct * HEAD_BYTES
