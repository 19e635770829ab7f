"""A key that a rank waits for: it is asked for once, where the store tells by itself when the key has come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from phalanx._comm.rendezvous.torch_store import Store, base_of
from phalanx.errors import CoordinationError


class AwaitedKey:
    """An `AwaitedKey` waits for the value of `key` in `store`. As a context manager it stops waiting on exit.

    Arguments:
        is_told: whether the store is to tell. If not, or if it cannot, it is asked at each look.

    Cost: at the job's coordinator one request in all, however long it takes; at other stores one request for each look.

    Raises:
        RuntimeError: whoever keeps the store has gone, as torch's stores say it. Each method may.
    """

    def __init__(self, store: Store, key: str, *, is_told: bool = True) -> None:
        self._store = store
        self._key = key
        self._value: bytes | None = None
        self._pending: Any = None  # the store's promise to tell, as long as there is one
        base = base_of(store)
        if is_told and hasattr(base, "begin_get"):
            with _in_torchs_words():
                self._pending = base.begin_get(base.name_through(store, key))

    def has_come(self) -> bool:
        """Return whether the value is there, without waiting for it."""
        if self._pending is None:
            return self._value is not None or self._store.check([self._key])
        with _in_torchs_words():
            self._keep(self._pending.look())
        return self._value is not None

    def wait(self, wait_s: float, pause_s: float) -> None:
        """Wait for the value at most `wait_s`; if the store does not tell, sleep for `pause_s` before the next look."""
        if self._pending is None:
            time.sleep(pause_s)
        else:
            with _in_torchs_words():
                self._keep(self._pending.wait(wait_s))

    def get(self) -> bytes:
        """Return the value, which must have come."""
        return self._store.get(self._key) if self._value is None else self._value

    def _keep(self, value: bytes | None) -> None:
        if value is not None:
            self._value = value
            self.stop_waiting()

    def stop_waiting(self) -> None:
        """Tell the store not to tell any more: from now on it is asked at each look."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()

    def __enter__(self) -> AwaitedKey:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(RuntimeError):
            self.stop_waiting()


@contextlib.contextmanager
def _in_torchs_words() -> Iterator[None]:
    try:
        yield
    except CoordinationError as error:
        raise RuntimeError(str(error)) from error
