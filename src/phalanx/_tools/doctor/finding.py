"""A `CheckResult` is the result of a check."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CheckStatus(enum.Enum):
    """`PROBLEM` means that training would fail; `WARNING` that it would work, with a loss."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class CheckResult:
    """A `CheckResult` is the result of a check. `advice` is what to do; empty only if all is well."""

    topic: str
    status: CheckStatus
    fact: str
    advice: str = ""
