"""A `CheckResult` is what a check says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CheckStatus(enum.Enum):
    """`PROBLEM` means that training would not work; `WARNING` that it would, with a loss."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class CheckResult:
    """It is what a check says. `advice` is what to do; it is empty only where all is well."""

    topic: str
    status: CheckStatus
    fact: str
    advice: str = ""
