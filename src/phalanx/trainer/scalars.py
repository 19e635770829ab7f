"""Scalars for TensorBoard, from rank 0, whichever process that is at the time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class Scalars:
    """Writes to `folder`, where `writes` says that this process does; nowhere if `folder` is None.

    It is asked each time: where rank 0 is lost, the process that is rank 0 from then on writes into a file beside the
    first one, and TensorBoard shows both as one run.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, writes: Callable[[], bool]) -> None:
        self._folder, self._writes = folder, writes
        self._writer: Any = None
        if folder is not None and writes():
            self._open(folder)

    def add(self, values: dict[str, float], step: int) -> None:
        """One point of each curve."""
        if self._folder is None or not self._writes():
            return
        if self._writer is None:
            self._open(self._folder)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _open(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # most of a second to import: only who needs it pays
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Trainer(log_dir=...) writes for TensorBoard, which is not installed: pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(os.fspath(folder))

    def close(self) -> None:
        """What was added is on the disk."""
        if self._writer is not None:
            self._writer.close()
