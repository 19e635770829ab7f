"""Give answers later: by another future's outcome, or by a thread that may wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from phalanx.errors import ClosedError


def pass_on(future: Future[Any], done: Future[Any], value: Any = None) -> None:
    """Give `future` the outcome of `done`, or `value` in the place of its result."""
    try:
        result = done.value()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result if value is None else value)


def on_thread(work: Callable[[], None]) -> None:
    """Call `work` on another thread than the one that reads."""

    def run() -> None:
        try:
            work()
        except ClosedError:  # this worker is at its end, too
            pass

    threading.Thread(target=run, name="phalanx-parameter-server", daemon=True).start()
