"""A `ReportFinding` is one sentence about a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["bad", "warn", "note", "good"]

FEW_STEPS = 10  # runs with fewer steps do not show the speed


@dataclass(frozen=True)
class ReportFinding:
    """A `ReportFinding` is a sentence, its importance, and its cost: a share of the run's time, or of a step."""

    severity: Severity
    text: str
    weight: float = 0.0
