"""Groups whose ranks are on several hosts: memory inside each, an engine between, composed hierarchically.

layout      who sits where, and who drives the rails
call        what a rank says that it calls
session     agree, carry out, fail with one report      failure_store, health_monitor: how the report travels
collectives memory, rails, memory                      rails, wire: what happens between the hosts
messages    point to point
"""

from __future__ import annotations

from phalanx.transport.base import Transport
from phalanx.transport.hierarchical.collectives import HierarchicalCollectives
from phalanx.transport.hierarchical.messages import HierarchicalMessages

__all__ = ["HierarchicalTransport"]


class HierarchicalTransport(HierarchicalCollectives, HierarchicalMessages, Transport):
    """Ranks on several hosts: shared memory in each, an engine between."""

    hears_signals = False  # an engine's wait hears none
