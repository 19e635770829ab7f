"""A checkpoint is the saved state of a job, written atomically, and read by any number of ranks.

Either one rank writes it, or all ranks do.
"""

from phalanx.checkpoint.contents import inspect
from phalanx.checkpoint.load import load_checkpoint
from phalanx.checkpoint.random_state import RandomState
from phalanx.checkpoint.save import save_checkpoint
from phalanx.checkpoint.series import CheckpointManager

__all__ = ["CheckpointManager", "RandomState", "inspect", "load_checkpoint", "save_checkpoint"]
