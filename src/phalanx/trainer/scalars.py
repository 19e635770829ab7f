"""Scalars for TensorBoard, from rank 0."""

from __future__ import annotations

import os
from typing import Any


class Scalars:
    """Writes to `folder`, or nowhere if that is None.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter  # most of a second to import: only who needs it pays
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Trainer(log_dir=...) writes for TensorBoard, which is not installed: pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(os.fspath(folder))

    def add(self, values: dict[str, float], step: int) -> None:
        """One point of each curve."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """What was added is on the disk."""
        if self._writer is not None:
            self._writer.close()
