"""The training loop, and what it shows."""

from phalanx.trainer.progress import Progress, progress

__all__ = ["Progress", "progress"]
