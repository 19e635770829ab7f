"""A checkpoint is what a job can go on from: it is written whole or not at all, and read by any number of ranks.

One rank writes it, or all of them do.
"""

from phalanx.checkpoint.contents import inspect
from phalanx.checkpoint.load import load_checkpoint
from phalanx.checkpoint.random_state import RandomState
from phalanx.checkpoint.save import save_checkpoint
from phalanx.checkpoint.series import CheckpointManager

__all__ = ["CheckpointManager", "RandomState", "inspect", "load_checkpoint", "save_checkpoint"]
