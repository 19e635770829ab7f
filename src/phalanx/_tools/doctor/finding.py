"""A `Finding` is what a check says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    """`PROBLEM` means that training would not work; `WARNING` that it would, with a loss."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """It is what a check says. `advice` is what to do; it is empty only where all is well."""

    topic: str
    status: Status
    fact: str
    advice: str = ""
