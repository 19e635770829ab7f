"""`HierarchicalTransport` carries a group whose ranks are on several hosts, for its process group."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx._comm.transport.base import Transport
from phalanx._comm.transport.hierarchical.collectives import HierarchicalCollectives
from phalanx._comm.transport.hierarchical.messages import HierarchicalMessages
from phalanx._comm.transport.hierarchical.preceding import Action, PrecedingMessages


class HierarchicalTransport(HierarchicalCollectives, HierarchicalMessages, Transport):
    """It carries operations of ranks on several hosts: by shared memory in each, and by an engine between."""

    is_interruptible = False  # its engine may wait in C++

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        return self.layout.topology.hosts

    def open_preceding(self, max_bytes: int, senders: Sequence[int]) -> PrecedingMessages:
        """Return this rank's end of messages that precede collectives. All ranks call it together."""
        return self._preceding.open(self._engine, max_bytes, senders)

    def precede(self, action: Action) -> None:
        """Call `action` in the next collective, before this rank takes part in it. It is forgotten if none comes."""
        self._preceding.action = action
