"""`PhalanxProcessGroup` implements c10d's process group."""

from __future__ import annotations

from phalanx._comm.backend.process_group.group import PhalanxProcessGroup

__all__ = ["PhalanxProcessGroup"]
