"""Groups whose ranks are on several hosts: memory inside each, an engine between, composed hierarchically.

layout      who sits where, and who drives the rails
call        what a rank says that it calls
session     agree, carry out, fail with one report      failure_store, health_monitor: how the report travels
collectives memory, rails, memory                      rails, wire: what happens between the hosts
messages    point to point
"""

from __future__ import annotations

from phalanx.transport.hierarchical.collectives import Collectives
from phalanx.transport.hierarchical.messages import Messages

__all__ = ["AcrossHosts"]


class AcrossHosts(Collectives, Messages):
    """What `SharedMemory` is for one host, for several. Tensors are on the CPU and checked by the caller."""
