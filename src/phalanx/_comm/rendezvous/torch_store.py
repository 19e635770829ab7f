"""The methods of torch's store that Phalanx calls, and the address of a store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol


class Store(Protocol):
    """A `Store` has the methods of torch's store that Phalanx calls."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Wait until the value is there, and return it."""

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of several keys, which must exist."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to the number at `key`, which starts at zero, and return the sum."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Store `desired` if the value is `expected` (empty: no value), and return the value afterwards."""

    def delete_key(self, key: str, /) -> bool: ...


def base_of(store: Any) -> Any:
    """Return the store inside torch's prefix stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def address_of(store: Any) -> str:
    """Return the address of a store, or "" if the store has none."""
    store = base_of(store)
    return f"{store.host} port {store.port}" if getattr(store, "host", "") else ""


def file_of(store: Any) -> str:
    """Return the path of a store in a named file, which outlives its job; else ""."""
    path = str(getattr(base_of(store), "path", ""))
    return "" if path.startswith("/proc/") else path
