"""`MLflowLogger` logs a run's curves for MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from phalanx.loggers.interface import Logger, Params, as_scalar, require_installed

_STATUS = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_MOST_PARAMS = 100  # MLflow takes so many in one request
_MOST_CHARACTERS = 500  # a parameter's value may have so many


class MLflowLogger(Logger):
    """Log into a run of MLflow, which is begun at the first call.

    Arguments:
        experiment: its name; it is made if it is not there.
        name: of the run.
        tracking_uri: of the server, the database or the folder. Default: MLflow's own, MLFLOW_TRACKING_URI.
        run_id: go on with this run.

    A job that goes on from a checkpoint goes on with the run of that checkpoint.

    Raises:
        ModuleNotFoundError: neither mlflow nor mlflow-skinny is installed.
    """

    def __init__(
        self,
        experiment: str = "phalanx",
        *,
        name: str | None = None,
        tracking_uri: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
    ) -> None:
        require_installed("mlflow", extra="mlflow", what="MLflowLogger")
        self.experiment, self.name, self.run_id = experiment, name, run_id
        self._uri = None if tracking_uri is None else os.fspath(tracking_uri)
        self._client: Any = None

    def log_hyperparams(self, params: Params) -> None:
        """Log the settings as parameters; what a run has already stays."""
        from mlflow.entities import Param

        client = self._open()
        known = set(client.get_run(self.run_id).data.params)
        new = [
            Param(name, str(as_scalar(value))[:_MOST_CHARACTERS]) for name, value in params.items() if name not in known
        ]
        for first in range(0, len(new), _MOST_PARAMS):
            client.log_batch(self.run_id, params=new[first : first + _MOST_PARAMS])

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the values in one request."""
        from mlflow.entities import Metric

        client, now = self._open(), int(1000 * time.time())
        client.log_batch(
            self.run_id, metrics=[Metric(name, float(value), now, step) for name, value in metrics.items()]
        )

    def log_file(self, path: str) -> None:
        """Log the file as an artifact."""
        self._open().log_artifact(self.run_id, path)

    def finalize(self, status: str) -> None:
        """End the run with its status; a later call goes on with it."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self.run_id, _STATUS.get(status, "FAILED"))

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id."""
        return {} if self.run_id is None else {"run_id": self.run_id}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with that run."""
        if self.run_id is None:
            self.run_id = state_dict.get("run_id")

    def _open(self) -> Any:
        """Return MLflow's client; there is then a run, which is running."""
        if self._client is None:
            from mlflow.tracking import MlflowClient

            client = MlflowClient(tracking_uri=self._uri)
            if self.run_id is None:
                known = client.get_experiment_by_name(self.experiment)
                experiment = known.experiment_id if known is not None else client.create_experiment(self.experiment)
                self.run_id = client.create_run(experiment, run_name=self.name).info.run_id
            else:
                client.update_run(self.run_id, status="RUNNING")
            self._client = client
        return self._client
