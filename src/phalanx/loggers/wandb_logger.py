"""`WandbLogger` logs metrics, settings and the report to a Weights & Biases run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.loggers.interface import Logger, Params, as_scalar, require_installed


class WandbLogger(Logger):
    """Log into a wandb run: your own (`run=wandb.init(...)`), or a new run that begins at the first call.

    Arguments:
        run: a run that `wandb.init` has returned; the logger does not finish it.
        options: arguments of `wandb.init`: project, name, dir, mode="offline", ...

    A job that resumes from a checkpoint resumes the run (`resume="allow"`); points between the checkpoint and the end
    of the earlier job then appear twice, because wandb cannot remove points.

    Raises:
        ModuleNotFoundError: the package wandb is not installed.
    """

    def __init__(self, *, run: Any = None, **options: Any) -> None:
        require_installed("wandb", extra="wandb", what="WandbLogger")
        self._run, self._is_ours = run, run is None
        self._options = options
        self._is_open = False

    @property
    def run(self) -> Any:
        """Return the wandb run; begin it if necessary."""
        if self._run is None:
            import wandb

            again = {"resume": "allow"} if "id" in self._options else {}
            self._run = wandb.init(**{**again, **self._options})
            self._options["id"] = self._run.id  # the same run after `finalize`, and in a later job
        if not self._is_open:
            self._is_open = True
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        return self._run

    def log_hyperparams(self, params: Params) -> None:
        """Add the settings to the run's config."""
        self.run.config.update({name: as_scalar(value) for name, value in params.items()}, allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the values with `step` as the x axis; wandb's own steps only count the calls."""
        self.run.log({**metrics, "step": step})

    def log_file(self, path: str) -> None:
        """Log an HTML page as media; save any other file with the run."""
        if path.endswith(".html"):
            import wandb

            page = Path(path)
            self.run.log({page.stem: wandb.Html(page.read_text(encoding="utf-8"), inject=False)})
        else:
            self.run.save(path, base_path=os.path.dirname(path) or ".", policy="now")

    def finalize(self, status: str) -> None:
        """Finish the run, unless the user passed it in."""
        if self._is_ours and self._run is not None:
            run, self._run, self._is_open = self._run, None, False
            run.finish(exit_code=int(status != "success"))

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id."""
        return {"id": self._options["id"]} if "id" in self._options else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume that run."""
        if self._is_ours and "id" in state_dict:
            self._options.setdefault("id", state_dict["id"])
