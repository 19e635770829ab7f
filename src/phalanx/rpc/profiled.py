"""These classes carry what a worker tells of the functions that it runs for others, where their callers profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RemoteEvent:
    """`RemoteEvent` happened on some worker, from `start_us` to `end_us` of its profile; `fields`: FunctionEvent's."""

    node_id: int
    start_us: float
    end_us: float
    is_async: bool
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Profiled:
    """`Profiled` has what a call has returned, and its events; it took `duration_us` in all."""

    result: Any
    duration_us: float
    events: Sequence[RemoteEvent]
