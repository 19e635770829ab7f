"""Log a run's metrics to Weights & Biases, MLflow, TensorBoard, a CSV file, or any logger with Lightning's interface.

    from phalanx.loggers import WandbLogger
    phalanx.Trainer(..., logger=WandbLogger(project="digits"))       # or logger="wandb", or several in a list
    phalanx.report.begin("runs/a", logger="csv")                     # in your own loop

Only one process of a job writes. A logger's failure is reported once, and never ends the training.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULE_OF = {
    "CSVLogger": "phalanx.loggers.csv_logger",
    "MLflowLogger": "phalanx.loggers.mlflow_logger",
    "TensorBoardLogger": "phalanx.loggers.tensorboard_logger",
    "WandbLogger": "phalanx.loggers.wandb_logger",
}

__all__ = list(_MODULE_OF)

if TYPE_CHECKING:
    from phalanx.loggers.csv_logger import CSVLogger as CSVLogger
    from phalanx.loggers.mlflow_logger import MLflowLogger as MLflowLogger
    from phalanx.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
    from phalanx.loggers.wandb_logger import WandbLogger as WandbLogger


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
