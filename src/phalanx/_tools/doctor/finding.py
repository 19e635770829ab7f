"""A `CheckResult` is the result of a check."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CheckStatus(enum.Enum):
    """`PROBLEM`: training would fail. `WARNING`: it would work, but slower or with less information."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class CheckResult:
    """A `CheckResult` is the result of a check. `advice` is the fix; empty only if nothing is wrong."""

    topic: str
    status: CheckStatus
    fact: str
    advice: str = ""
