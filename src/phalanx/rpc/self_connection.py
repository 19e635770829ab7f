"""A worker's calls to itself: pickled like all others, while tensors stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phalanx.rpc.wire import Frame


class SelfConnection:
    """What is sent arrives; `peer` is None: it is this worker."""

    peer = None
    reading = None

    def __init__(self, arrive: Callable[[Frame], None]) -> None:
        self._arrive = arrive

    def send(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        """Deliver a frame."""
        self._arrive(Frame(kind, call, data, extras, buffers))

    put = send

    def flush(self) -> None:
        """Nothing is ever put aside."""
