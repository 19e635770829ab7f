"""Keep training when ranks are lost: this package keeps the state from which an elastic job continues."""

from phalanx.elastic.run import run
from phalanx.elastic.state import State

__all__ = ["State", "run"]
