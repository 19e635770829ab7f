"""Write a run's scalars from rank 0, whichever process that is at the time, for TensorBoard and its loggers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.loggers.guarded import GuardedLoggers


class Scalars:
    """`Scalars` writes to `folder`, unless that is None, and to `loggers`, while `writes` says that this process does.

    `writes` is called each time: if rank 0 is lost, the process that is rank 0 from then on writes into a file beside
    the first one, and TensorBoard shows both as one run.

    It is a part of checkpoints: a run that goes on from one takes back what was written behind it, so that each point
    is there once. For that TensorBoard is told to forget all from the checkpoint's step on, and that step is written
    anew.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        writes: Callable[[], bool],
        loggers: GuardedLoggers | None = None,
    ) -> None:
        self.folder, self._writes = folder, writes
        self.loggers = loggers or GuardedLoggers((), writes)
        self._writer: Any = None
        self._step = 0
        self._latest: dict[str, float] = {}  # the values of that step

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add one point to each curve."""
        if self.folder is None and not self.loggers:
            return
        here = self._latest if step == self._step else {}
        new = {name: value for name, value in values.items() if name not in here}  # a step may be done again
        self._latest, self._step = {**here, **new}, step
        self._write(new)
        self.loggers.log_metrics(new, step)

    def _write(self, values: Mapping[str, float]) -> None:
        if self.folder is not None and self._writes():
            self._open()
            for name, value in values.items():
                self._writer.add_scalar(name, value, self._step)

    def begin(self, *, again_from: int | None = None, params: Mapping[str, Any] | None = None) -> None:
        """Open the folder, if this process writes; `again_from` is the step of the checkpoint, 0 if there is none.

        The loggers get `params`, the settings of the run.
        """
        self.loggers.begin(again_from, params or {})
        if self.folder is not None and self._writes():
            self._open(again_from)
            if again_from is not None and again_from == self._step:
                self._write(self._latest)

    def _open(self, again_from: int | None = None) -> None:
        if self._writer is not None:
            return
        try:
            # its import takes most of a second, which only those pay who need it
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Trainer(log_dir=...) writes for TensorBoard, which is not installed: pip install tensorboard"
            ) from error
        assert self.folder is not None
        self._writer = SummaryWriter(os.fspath(self.folder), purge_step=again_from)

    def flush(self) -> None:
        """Write what was added to the disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file; everything that was added is on the disk."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the curves."""
        return {"step": self._step, "latest": dict(self._latest), "loggers": self.loggers.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the position of the curves. Call this before `begin`."""
        self._step, self._latest = state_dict["step"], dict(state_dict["latest"])
        self.loggers.load_state_dict(state_dict.get("loggers", {}))  # a checkpoint of version 0.1 has none
