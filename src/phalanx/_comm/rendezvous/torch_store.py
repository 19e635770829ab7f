"""Say which methods of torch's store we call, and find out where a store is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol


class Store(Protocol):
    """These are the methods of torch's store that we call."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Wait until the value is there, and return it."""

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of several keys, which are there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, which begins at zero, and return the sum."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Store `desired` if the value is `expected` (empty: there is none), and return the value afterwards."""

    def delete_key(self, key: str, /) -> bool: ...


def base_of(store: Any) -> Any:
    """Return the store itself, without the prefixes that torch puts around it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def address_of(store: Any) -> str:
    """Return the address of a store that has one; else an empty string."""
    store = base_of(store)
    return f"{store.host} port {store.port}" if getattr(store, "host", "") else ""


def file_of(store: Any) -> str:
    """Return the path of a store in a file that has a name, and so outlives its job; else an empty string."""
    path = str(getattr(base_of(store), "path", ""))
    return "" if path.startswith("/proc/") else path
