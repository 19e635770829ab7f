"""`MLflowLogger` logs metrics, settings and the report to an MLflow run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.loggers.interface import Logger, Params, as_scalar, require_installed

_STATUS = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_MOST_PARAMS = 100  # MLflow's limit per request
_MOST_CHARACTERS = 500  # MLflow's limit for the value of a parameter
_MOST_OF_A_NAME = 200
_FOREIGN = re.compile(r"[^\w. :-]", re.ASCII)  # slashes, and characters that MLflow refuses in names


class MLflowLogger(Logger):
    """Log into an MLflow run, which begins at the first call.

    Arguments:
        experiment: the name of the experiment, which is created if missing.
        name: the name of the run.
        tracking_uri: the server, database or folder. Default: that of MLflow itself (MLFLOW_TRACKING_URI).
        run_id: the run to resume.

    A job that resumes from a checkpoint resumes the run of that checkpoint.

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
        """Log the settings as parameters, named by `plan_names`; leave a run's existing parameters unchanged."""
        from mlflow.entities import Param

        client, names = self._open(), plan_names(params)
        known = set(client.get_run(self.run_id).data.params)
        self._log_all(
            "params",
            [
                Param(names[name], str(as_scalar(value))[:_MOST_CHARACTERS])
                for name, value in params.items()
                if names[name] not in known
            ],
        )

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the values in one request."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._log_all("metrics", [Metric(name, float(value), now, step) for name, value in metrics.items()])

    def log_file(self, path: str) -> None:
        """Log the file as an artifact."""
        self._open().log_artifact(self.run_id, path)

    def finalize(self, status: str) -> None:
        """End the run with its status; a later call resumes it."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self.run_id, _STATUS.get(status, "FAILED"))

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id."""
        return {} if self.run_id is None else {"run_id": self.run_id}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume that run."""
        if self.run_id is None:
            self.run_id = state_dict.get("run_id")

    def _log_all(self, kind: str, items: Sequence[Any]) -> None:
        """Log params or metrics. If a request is refused, log its items one by one, to lose only the refused ones."""
        client, refused = self._open(), []
        for first in range(0, len(items), _MOST_PARAMS):
            batch = items[first : first + _MOST_PARAMS]
            try:
                client.log_batch(self.run_id, **{kind: batch})
            except Exception as error:
                if not _is_refusal(error):
                    raise
                for item in batch:
                    try:
                        client.log_batch(self.run_id, **{kind: [item]})
                    except Exception as own:
                        refused.append(f"{item.key!r}: {own}")
        if refused:
            raise ValueError(f"MLflow refuses {len(refused)} of {len(items)} {kind}: {'; '.join(refused)}")

    def _open(self) -> Any:
        """Return MLflow's client; begin or resume the run if necessary."""
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


def plan_names(names: Iterable[str]) -> dict[str, str]:
    """Return, for each name, a unique name that every MLflow store accepts.

    MLflow's file store keeps each parameter in a file with its name, so "optimizer/lr" would need "optimizer" to be a
    folder. Therefore slashes become dots. The same names get the same result in every run.
    """
    planned: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names, key=lambda name: (_plain(name) != name, name)):  # names that need no change come first
        plain, number = _plain(name), 1
        while (free := plain if number == 1 else f"{plain}-{number}").lower() in taken:
            number += 1
        taken.add(free.lower())  # file names may ignore case
        planned[name] = free
    return planned


def _plain(name: str) -> str:
    plain = _FOREIGN.sub("_", name.replace("/", "."))[:_MOST_OF_A_NAME].rstrip()
    return f"_{plain}" if not plain or plain[0] in ". " else plain


def _is_refusal(error: Exception) -> bool:
    """Return whether MLflow, or the disk, refuses values of a request, so that it may accept the others."""
    return isinstance(error, OSError) or getattr(error, "error_code", "") in (
        "INVALID_PARAMETER_VALUE",
        "INTERNAL_ERROR",
        "BAD_REQUEST",
    )
