"""A worker's calls to itself: pickled and copied like all others, so that neither side sees what the other changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from phalanx.rpc.wire import Frame


class SelfConnection:
    """What is sent arrives; `peer` is None: it is this worker."""

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
        """Nothing is ever put aside."""
