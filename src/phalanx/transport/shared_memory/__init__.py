"""The ranks of one host: all of them map the memory of all, and the C core moves and combines in it.

session      one collective at a time, call sites, who is late, the end
collectives  tensors in, the core underneath
messages     send, and receives that are posted
"""

from __future__ import annotations

from phalanx.transport.base import Transport
from phalanx.transport.shared_memory.collectives import SharedMemoryCollectives
from phalanx.transport.shared_memory.messages import SharedMemoryMessages

__all__ = ["SharedMemoryTransport"]


class SharedMemoryTransport(SharedMemoryCollectives, SharedMemoryMessages, Transport):
    """All ranks of the group are on this host.

    One collective at a time: `lock` is held while the core runs one. Point to point needs no lock across channels.
    """

    ranks_share_memory = True
    closes_in_flight = True
    eager_bytes = 32768  # ranks that wait for each other cost more than bytes that nobody reads
