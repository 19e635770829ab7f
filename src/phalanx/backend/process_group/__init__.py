"""c10d's process group over shared memory, in three parts: who it is, its collectives, its messages."""

from __future__ import annotations

from phalanx.backend.process_group.collectives import Collectives
from phalanx.backend.process_group.messages import Messages

__all__ = ["PhalanxProcessGroup"]


class PhalanxProcessGroup(Collectives, Messages):
    """The backend "phalanx" for the ranks of one host. Made by `init_process_group("phalanx")`, not by hand."""
