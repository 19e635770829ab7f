"""c10d's process group in three parts: who it is, its collectives, its messages."""

from __future__ import annotations

from phalanx.backend.process_group.coalesced import ProcessGroupCoalesced
from phalanx.backend.process_group.messages import ProcessGroupMessages

__all__ = ["PhalanxProcessGroup"]


class PhalanxProcessGroup(ProcessGroupCoalesced, ProcessGroupMessages):
    """The backend "phalanx", made by `init_process_group("phalanx")`, not by hand."""
