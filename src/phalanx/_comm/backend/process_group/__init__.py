"""`PhalanxProcessGroup` is c10d's process group, in three parts: its base, its collectives and its messages."""

from __future__ import annotations

from phalanx._comm.backend.process_group.coalesced import ProcessGroupCoalesced
from phalanx._comm.backend.process_group.messages import ProcessGroupMessages

__all__ = ["PhalanxProcessGroup"]


class PhalanxProcessGroup(ProcessGroupCoalesced, ProcessGroupMessages):
    """This is the backend "phalanx"; `init_process_group("phalanx")` makes it, and programs do not."""
