"""Elastic training: `State` names what to keep, and `run` resumes from it after ranks are lost or join."""

from phalanx.elastic.run import run
from phalanx.elastic.state import State

__all__ = ["State", "run"]
