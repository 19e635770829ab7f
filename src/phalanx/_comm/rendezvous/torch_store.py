"""Declare the methods of `torch.distributed.Store` that Phalanx calls, and find the address or file of a store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol


class Store(Protocol):
    """A `Store` has the methods of `torch.distributed.Store` that Phalanx calls."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Wait until the key is set, and return its value."""

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of several keys, which must exist."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to the number at `key`, 0 if the key is missing, and return the sum."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Store `desired` if the value is `expected` (empty: no value), and return the value afterwards."""

    def delete_key(self, key: str, /) -> bool: ...


def base_of(store: Any) -> Any:
    """Return the store that torch's prefix stores wrap, or `store` itself."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def address_of(store: Any) -> str:
    """Return the address of a store, or "" if the store has none."""
    store = base_of(store)
    return f"{store.host} port {store.port}" if getattr(store, "host", "") else ""


def file_of(store: Any) -> str:
    """Return the path of a FileStore whose file outlives its job; "" for other stores."""
    path = str(getattr(base_of(store), "path", ""))
    return "" if path.startswith("/proc/") else path
