"""`GroupOptions` are the part of torch's backend options that people read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass
class GroupOptions:
    """They have the names that torch's backends give them."""

    _timeout: timedelta
    global_ranks_in_group: list[int]
    group_name: str
    backend: str
