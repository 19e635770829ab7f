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
from phalanx._comm.engines.engine import Engine
from phalanx._comm.transport.hierarchical.exchange import (
    ALWAYS_SMALL_BYTES,
    SENT,
    SMALL_BYTES,
    DirectExchange,
    HostMessage,
    LeaderExchange,
    aligned,
    longest_message,
    read_message,
    write_message,
)
from phalanx._comm.transport.hierarchical.inboxes import Inboxes, MessageBuffer
from phalanx._comm.transport.hierarchical.layout import Layout

MOST_DIRECT = 3  # with more hosts, leaders forward messages
_HEADER_BYTES = 64  # in front of the messages of a round; the first word is the total length


class _Round(NamedTuple):
    """A `_Round` is one round of an operation; it sends `num_hosts` hosts' messages to the host `step` further on."""

    step: int
    receiver: int
    sender: int
    num_hosts: int


class BruckExchange(LeaderExchange):
    """A `BruckExchange` sends ceil(log2 H) messages per operation with H hosts. All hosts get the same payload."""

    is_direct = False

    def __init__(self, engine: Engine, layout: Layout) -> None:
        hosts, me = layout.topology.hosts, layout.host
        size = len(hosts)
        # The hosts in the order in which their messages arrive, this host first; and the number of ranks on each.
        self._order = [(me - n) % size for n in range(size)]
        self._sizes = [len(hosts[host]) for host in self._order]
        self._rounds = [
            _Round(step, hosts[(me + step) % size][0], hosts[(me - step) % size][0], min(step, size - step))
            for step in (1 << number for number in range((size - 1).bit_length()))
        ]
        payload_bytes = max(SMALL_BYTES // (size - 1), ALWAYS_SMALL_BYTES)
        longest = [aligned(longest_message(num_ranks, payload_bytes)) for num_ranks in self._sizes]
        self._own = MessageBuffer(longest[0])
        self._messages: list[tuple[int, int]] = []  # of this operation: addresses and lengths, as in `_order`
        inboxes = Inboxes(
            engine,
            {number: one.sender for number, one in enumerate(self._rounds)},
            {
                number: _HEADER_BYTES + sum(longest[one.step : one.step + one.num_hosts])
                for number, one in enumerate(self._rounds)
            },
            lambda _, inbox: int(inbox.first_word.value),
        )
        outboxes = {
            number: [MessageBuffer(_HEADER_BYTES + sum(longest[: one.num_hosts])) for _ in range(SENT)]
            for number, one in enumerate(self._rounds)
        }
        super().__init__(engine, layout, inboxes, outboxes)

    def send(self, heads: Sequence[bytes], payloads: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Send as `LeaderExchange.send` does; all payloads must be the same, or there is none."""
        self.inboxes.post()
        end = write_message(self._own, heads, next(iter(payloads.values()), ()))
        self._messages = [(self._own.address, aligned(end))]
        self._send_round(0)

    def _send_round(self, number: int) -> None:
        one = self._rounds[number]
        outbox = self.outbox(number)
        end = _HEADER_BYTES
        for address, nbytes in self._messages[: one.num_hosts]:
            ctypes.memmove(outbox.address + end, address, nbytes)
            end += nbytes
        outbox.first_word.value = end
        self.post(outbox, end, one.receiver)

    def receive(self, deadline: Deadline) -> dict[int, HostMessage]:
        """Receive as `LeaderExchange.receive` does, and forward messages to other hosts."""
        found: dict[int, HostMessage] = {}
        for number, one in enumerate(self._rounds):
            if number:
                self._send_round(number)
            inbox = self.inboxes.receive(number, deadline)
            at = _HEADER_BYTES
            for _ in range(one.num_hosts):
                place = len(self._messages)
                message, end = read_message(inbox, at, self._sizes[place])
                found[self._order[place]] = message
                self._messages.append((inbox.address + at, end - at))
                at = end
        return found


def open_exchange(engine: Engine, layout: Layout) -> LeaderExchange:
    """Return the exchange for the layout's number of hosts; every host chooses the same kind."""
    return DirectExchange(engine, layout) if layout.num_hosts <= MOST_DIRECT else BruckExchange(engine, layout)
