"""An elastic job goes on training when ranks are lost or come; this package keeps the state that it goes on from."""

from phalanx.elastic.run import run
from phalanx.elastic.state import State

__all__ = ["State", "run"]
