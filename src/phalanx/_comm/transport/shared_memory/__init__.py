"""Carry groups of one host: all ranks map the memory of all, and the C core moves and combines data in it.

session      one collective at a time, call sites, who is late, the end
collectives  tensors in, the core underneath
messages     send, and receives that are posted
"""

from __future__ import annotations

from phalanx._comm.transport.base import Transport
from phalanx._comm.transport.shared_memory.collectives import SharedMemoryCollectives
from phalanx._comm.transport.shared_memory.messages import SharedMemoryMessages

__all__ = ["SharedMemoryTransport"]


class SharedMemoryTransport(SharedMemoryCollectives, SharedMemoryMessages, Transport):
    """It carries a group whose ranks are all on this host.

    It runs one collective at a time, and holds `lock` while the core does it. Messages need no lock across channels.
    """

    ranks_share_memory = True
    closes_in_flight = True
    eager_bytes = 32768  # ranks that wait for each other cost more than bytes that nobody reads
