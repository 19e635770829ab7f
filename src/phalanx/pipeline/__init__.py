"""A pipeline cuts a model into stages on several ranks, and micro-batches flow through the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Pipeline"]

if TYPE_CHECKING:
    from phalanx.pipeline.pipeline import Pipeline as Pipeline


def __getattr__(name: str) -> Any:
    if name == "Pipeline":  # on first use: drawing schedules needs no torch
        from phalanx.pipeline.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
