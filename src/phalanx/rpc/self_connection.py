"""A worker's calls to itself are pickled and copied like all others, so that neither side sees the other's changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from phalanx.rpc.wire import Frame


class SelfConnection:
    """`SelfConnection` delivers what is sent to this worker itself; `peer` is None."""

    peer = None
    reading = None

    def __init__(self, arrive: Callable[[Frame], None]) -> None:
        self._arrive = arrive

    def send(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        """Deliver a frame, with a copy of its tensors."""
        copies = [numpy.frombuffer(one, dtype=numpy.uint8).copy() for one in buffers]
        self._arrive(Frame(kind, call, data, extras, copies))

    put = send

    def flush(self) -> None:
        """Do nothing: this connection never holds frames back."""
