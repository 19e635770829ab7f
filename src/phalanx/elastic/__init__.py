"""Lose a rank, keep training: what survives a change of membership, and how training goes on."""

from phalanx.elastic.run import run
from phalanx.elastic.state import State

__all__ = ["State", "run"]
