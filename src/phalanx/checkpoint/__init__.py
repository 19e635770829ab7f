"""Save the state of a job atomically, by one rank or by all ranks, and load it on any number of ranks."""

from phalanx.checkpoint.contents import inspect
from phalanx.checkpoint.load import load_checkpoint
from phalanx.checkpoint.random_state import RandomState
from phalanx.checkpoint.save import save_checkpoint
from phalanx.checkpoint.series import CheckpointManager

__all__ = ["CheckpointManager", "RandomState", "inspect", "load_checkpoint", "save_checkpoint"]
