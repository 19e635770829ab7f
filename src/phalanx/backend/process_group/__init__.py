"""c10d's process group in three parts: who it is, its collectives, its messages."""

from __future__ import annotations

from phalanx.backend.process_group.collectives import Collectives
from phalanx.backend.process_group.messages import Messages

__all__ = ["PhalanxProcessGroup"]


class PhalanxProcessGroup(Collectives, Messages):
    """The backend "phalanx", on one host or several. Made by `init_process_group("phalanx")`, not by hand."""
