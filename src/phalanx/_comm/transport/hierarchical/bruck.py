"""Let the leaders of many hosts forward each other's messages, as in the all-gather of Bruck et al. (1997).

    round 0   host h sends to host h + 1    its own message
    round 1             to host h + 2       those of h and h - 1
    round 2             to host h + 4       those of h, h - 1, h - 2 and h - 3            (numbers modulo the hosts)

So each leader sends and receives ceil(log2 H) messages for an operation of H hosts, instead of H - 1 direct messages;
the bytes are the same. A round begins when the previous round has ended, so each round costs one latency. With three
hosts or fewer, messages are sent directly, which takes no more messages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx._base.deadline import Deadline
from phalanx._comm.engines.engine import ShortMessages
from phalanx._comm.transport.hierarchical.exchange import (
    ALWAYS_SMALL_BYTES,
    SMALL_BYTES,
    DirectExchange,
    HostMessage,
    LeaderExchange,
    MessageBuffer,
    aligned,
    longest_message,
    read_message,
    write_message,
)
from phalanx._comm.transport.hierarchical.layout import Layout
from phalanx._comm.transport.hierarchical.rails import as_connection_broken

MOST_DIRECT = 3  # with more hosts, leaders forward messages


class _Round(NamedTuple):
    """A `_Round` is one round of an operation; it sends `num_hosts` hosts' messages to the host `step` further on."""

    step: int
    receiver: int
    sender: int
    num_hosts: int


class BruckExchange(LeaderExchange):
    """A `BruckExchange` sends ceil(log2 H) messages per operation with H hosts. All hosts get the same payload."""

    is_direct = False

    def __init__(self, messages: ShortMessages, layout: Layout) -> None:
        super().__init__(messages, layout)
        hosts, me = layout.topology.hosts, layout.host
        size = len(hosts)
        # The hosts in the order in which their messages arrive, this host first; and the number of ranks on each.
        self._order = [(me - n) % size for n in range(size)]
        self._sizes = [len(hosts[host]) for host in self._order]
        self._rounds = [
            _Round(step, hosts[(me + step) % size][0], hosts[(me - step) % size][0], min(step, size - step))
            for step in _steps(size)
        ]
        payload_bytes = max(SMALL_BYTES // (size - 1), ALWAYS_SMALL_BYTES)
        longest = [aligned(longest_message(num_ranks, payload_bytes)) for num_ranks in self._sizes]
        self._own = MessageBuffer(longest[0])
        self._outbox = MessageBuffer(sum(longest[: max(one.num_hosts for one in self._rounds)]))
        self._inboxes = [MessageBuffer(sum(longest[one.step : one.step + one.num_hosts])) for one in self._rounds]
        self._found: list[tuple[int, int]] = []  # in this operation: messages' addresses and lengths, as in `_order`

    def send(self, heads: Sequence[bytes], payloads: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Send as `LeaderExchange.send` does; all payloads must be the same, or there is none."""
        end = write_message(self._own, heads, next(iter(payloads.values()), ()))
        self._found = [(self._own.address, aligned(end))]
        self._send_round(self._rounds[0])

    def _send_round(self, one: _Round) -> None:
        end = 0
        for address, nbytes in self._found[: one.num_hosts]:
            ctypes.memmove(self._outbox.address + end, address, nbytes)
            end += nbytes
        with as_connection_broken(one.receiver):
            self.messages.send(one.receiver, self._outbox.bytes[:end])

    def receive(self, deadline: Deadline) -> dict[int, HostMessage]:
        """Receive as `LeaderExchange.receive` does, and forward messages to other hosts."""
        found: dict[int, HostMessage] = {}
        for number, (one, inbox) in enumerate(zip(self._rounds, self._inboxes, strict=True)):
            if number:
                self._send_round(one)
            with as_connection_broken(one.sender):
                self.messages.receive(one.sender, inbox.bytes, deadline)
            at = 0
            for _ in range(one.num_hosts):
                place = len(self._found)
                message, end = read_message(inbox, at, self._sizes[place])
                found[self._order[place]] = message
                self._found.append((inbox.address + at, end - at))
                at = end
        with as_connection_broken(one.receiver):
            self.messages.flush(deadline)
        return found


def leader_peers(layout: Layout) -> tuple[int, ...]:
    """Return the ranks with which this rank exchanges messages as its host's leader; () if it is not the leader."""
    if layout.local_rank:
        return ()
    hosts, me, size = layout.topology.hosts, layout.host, layout.num_hosts
    steps = range(1, size) if size <= MOST_DIRECT else _steps(size)
    return tuple(sorted({hosts[(me + sign * step) % size][0] for step in steps for sign in (1, -1)}))


def _steps(num_hosts: int) -> list[int]:
    return [1 << number for number in range((num_hosts - 1).bit_length())]


def open_exchange(messages: ShortMessages, layout: Layout) -> LeaderExchange:
    """Return the exchange for the layout's number of hosts; every host chooses the same kind."""
    return (DirectExchange if layout.num_hosts <= MOST_DIRECT else BruckExchange)(messages, layout)
