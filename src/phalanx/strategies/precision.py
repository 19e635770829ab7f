"""Choose the precision of the forward."""

from __future__ import annotations

from typing import Literal, get_args

import torch

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast; None means no autocast.

    Raises:
        ValueError: the precision is unknown, or `device` does not support it.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
    if precision == "16-mixed" and device.type == "cpu":
        raise ValueError("precision '16-mixed' is for GPUs; on a CPU use 'bf16-mixed', which needs no scaling")
    return {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[precision]
