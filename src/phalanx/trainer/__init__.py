"""`Trainer` is the training loop; this package also contains its callbacks, metrics and progress display."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULE_OF = {
    "Trainer": "phalanx.trainer.trainer",
    "Callback": "phalanx.trainer.callbacks",
    "EarlyStopping": "phalanx.trainer.callbacks",
    "LambdaCallback": "phalanx.trainer.callbacks",
    "SummedMetric": "phalanx.trainer.metrics",
    "Progress": "phalanx.trainer.progress_display",
    "progress": "phalanx.trainer.progress_display",
}

__all__ = list(_MODULE_OF)

if TYPE_CHECKING:
    from phalanx.trainer.callbacks import Callback as Callback
    from phalanx.trainer.callbacks import EarlyStopping as EarlyStopping
    from phalanx.trainer.callbacks import LambdaCallback as LambdaCallback
    from phalanx.trainer.metrics import SummedMetric as SummedMetric
    from phalanx.trainer.progress_display import Progress as Progress
    from phalanx.trainer.progress_display import progress as progress
    from phalanx.trainer.trainer import Trainer as Trainer


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
