"""`CSVLogger` writes a run's metrics to a table, metrics.csv, with hyperparameters and the report beside it."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Mapping

from phalanx.loggers.interface import Logger, Params, as_scalar

_TABLE, _SETTINGS = "metrics.csv", "hyperparameters.json"


class CSVLogger(Logger):
    """Write `folder`/metrics.csv: a column for the step and one for each metric, and a row for each call.

    A row is in the file when the call returns. A run that resumes from a checkpoint drops the rows from the
    checkpoint's step on, and appends. A new run in the folder renames the existing table to metrics.1.csv,
    metrics.2.csv, ...

    Cost: a new metric rewrites the file.
    """

    def __init__(self, folder: str | os.PathLike[str] = "logs") -> None:
        self.folder = os.fspath(folder)
        if not self.folder:
            raise ValueError("CSVLogger: needs the name of a folder, got ''")
        self.path = os.path.join(self.folder, _TABLE)
        self._columns: list[str] | None = None  # None until the file is read or written

    def begin(self, again_from: int | None) -> None:
        """Begin a new table, or continue the table of the run that wrote the checkpoint."""
        if not os.path.exists(self.path) or (self._columns is not None and not again_from):
            return
        if not again_from:
            number = 1
            while os.path.exists(kept := os.path.join(self.folder, f"metrics.{number}.csv")):
                number += 1
            os.rename(self.path, kept)
            return
        columns, rows = self._read()
        self._write(columns, [row for row in rows if int(row["step"]) < again_from])

    def log_hyperparams(self, params: Params) -> None:
        """Write the settings as JSON."""
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(self.folder, _SETTINGS), "w", encoding="utf-8") as file:
            json.dump({name: as_scalar(value) for name, value in params.items()}, file, indent=1)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a row."""
        if self._columns is None:
            os.makedirs(self.folder, exist_ok=True)
            self._columns = self._read()[0] if os.path.exists(self.path) else []
        new = [name for name in metrics if name not in self._columns]
        if new:
            columns, rows = self._read() if self._columns else (["step"], [])
            self._write([*columns, *new], rows)
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow({"step": step, **metrics})

    def log_file(self, path: str) -> None:
        """Copy the file into the folder."""
        shutil.copy(path, self.folder)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        with open(self.path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            # A kill or a full disk may have cut a row short.
            rows = [row for row in reader if row["step"].isdecimal() and None not in row]
            return list(reader.fieldnames or ["step"]), rows

    def _write(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """Rewrite the table atomically."""
        with open(f"{self.path}.part", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(f"{self.path}.part", self.path)
        self._columns = columns
