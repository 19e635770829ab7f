"""Groups whose ranks are on several hosts, as the process group sees them."""

from __future__ import annotations

from phalanx.transport.base import Transport
from phalanx.transport.hierarchical.collectives import HierarchicalCollectives
from phalanx.transport.hierarchical.messages import HierarchicalMessages


class HierarchicalTransport(HierarchicalCollectives, HierarchicalMessages, Transport):
    """Ranks on several hosts: shared memory in each, an engine between."""

    is_interruptible = False  # its engine may wait in C++
