"""What a job can go on from: written whole by one rank or not at all, read by each."""

from phalanx.checkpoint.load import load_checkpoint
from phalanx.checkpoint.save import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
