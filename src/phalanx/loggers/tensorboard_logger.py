"""`TensorBoardLogger` writes metrics and settings to TensorBoard's event files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from phalanx.loggers.interface import Logger, Params, as_scalar, require_installed


class TensorBoardLogger(Logger):
    """Write event files into `folder`, with the hyperparameters as text, and copy the report there.

    If a run resumes from a checkpoint, TensorBoard drops the points from the checkpoint's step on.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str] = "logs") -> None:
        self.folder = os.fspath(folder)
        if not self.folder:
            raise ValueError("TensorBoardLogger: needs the name of a folder, got ''")
        require_installed("tensorboard", extra="tensorboard", what="TensorBoardLogger")
        self._writer: Any = None
        self._again_from: int | None = None

    def begin(self, again_from: int | None) -> None:
        """Record the step from which TensorBoard should drop existing points."""
        self._again_from = again_from

    def log_hyperparams(self, params: Params) -> None:
        """Add a table of the settings."""
        rows = "\n".join(f"| {name} | {as_scalar(value)} |" for name, value in params.items())
        self._open().add_text("hyperparameters", f"| name | value |\n| --- | --- |\n{rows}")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each metric."""
        writer = self._open()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def log_file(self, path: str) -> None:
        """Copy the file into the folder."""
        self._open()
        shutil.copy(path, self.folder)

    def flush(self) -> None:
        """Write the events to disk."""
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Close the event file; a later call opens another one."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # imported on use: the import takes most of a second

            self._writer = SummaryWriter(self.folder, purge_step=self._again_from)
            self._again_from = None
        return self._writer
