"""A `KeyValueStore` holds a job's keys, values and queues, like c10d's Store, without a clock or a network.

A request that waits is a `Waiter`. The method that creates the last key for which it waits returns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx._comm.control.wire import MAX_VALUE_BYTES

MAX_KEY_BYTES = 64 << 10
_OVERHEAD_BYTES = 200  # the memory that a key, or an item of a queue, needs in this process besides its bytes
_NUMBER_BYTES = 64  # a longer value is not a number


class RefusedError(ValueError):
    """The request is invalid, or exceeds a limit; nothing was changed."""


@dataclass(eq=False)
class Waiter:
    """A `Waiter` waits until all of `missing` exist, or for the next item of `queue`."""

    owner: Any
    keys: Sequence[bytes] = ()
    queue: bytes | None = None
    accepts_queues: bool = False  # whether a queue of that name counts as the key
    missing: set[bytes] = field(default_factory=set)


class KeyValueStore:
    """A `KeyValueStore` holds keys, values and queues, within `max_bytes`.

    The methods that add a key or an item return the waiters that became ready, the oldest first.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._values: dict[bytes, bytes | bytearray] = {}  # a bytearray: a value was appended since the last read
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiters: dict[bytes, dict[Waiter, None]] = {}  # the waiters for each key or queue, the oldest first

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None."""
        value = self._values.get(key)
        if isinstance(value, bytearray):
            value = self._values[key] = bytes(value)
        return value

    def has(self, keys: Iterable[bytes]) -> bool:
        """Return whether all keys exist, as keys or as non-empty queues."""
        return all(key in self._values or key in self._queues for key in keys)

    def _has_values(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def set(self, key: bytes, value: bytes) -> list[Waiter]:
        old = self._values.get(key)
        if old is None:
            self._room(key, len(value), len(key) + len(value) + _OVERHEAD_BYTES)
            self._values[key] = value
            return self._pop_ready(key) if key in self._waiters else []
        self._room(key, len(value), len(value) - len(old))
        self._values[key] = value
        return []

    def multi_set(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[Waiter]:
        """Set all values, or none if a key or value is too long or the room does not suffice for all as new keys."""
        for key, value in zip(keys, values, strict=True):
            _check_lengths(key, len(value))
        grows = sum(len(key) + len(value) + _OVERHEAD_BYTES for key, value in zip(keys, values, strict=True))
        if self.num_bytes + grows > self.max_bytes:
            self._full()
        ready = []
        for key, value in zip(keys, values, strict=True):
            ready += self.set(key, value)
        return ready

    def add(self, key: bytes, amount: int) -> tuple[int, list[Waiter]]:
        """Add to the number at `key`, 0 if the key is missing; store the sum as decimal digits, and return it, too."""
        total = self._sum(key, amount)
        return total, self.set(key, b"%d" % total)

    def add_items(self, counter: bytes, prefix: bytes, values: Sequence[bytes]) -> tuple[int, list[Waiter]]:
        """Add the number of `values` to `counter`, and set a key for each value: `prefix` and the value's number.

        Either everything is set or nothing. Return the number of the first value, too.
        """
        total = self._sum(counter, len(values))
        first = total - len(values)
        keys = [prefix + b"%d" % number for number in range(first, total)]
        return first, self.multi_set([*keys, counter], [*values, b"%d" % total])

    def _sum(self, key: bytes, amount: int) -> int:
        old = self._values.get(key, b"0")
        try:
            total = int(old if len(old) <= _NUMBER_BYTES else b"none") + amount
        except ValueError:
            raise RefusedError(f"add: the value of {_shown(key)} is not a number") from None
        if not -(1 << 63) <= total < 1 << 63:
            raise RefusedError(f"add: the sum at {_shown(key)} has more than 64 bits")
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, list[Waiter]]:
        """Replace the value if it is `expected`; a missing key counts as empty. Return the resulting value, too.

        As in TCPStore: if the key is missing and another value was expected, return the expected value.
        """
        old = self.get(key)
        if old is None and expected:
            return expected, []
        if old is not None and old != expected:
            return old, []
        return desired, self.set(key, desired)

    def append(self, key: bytes, value: bytes) -> list[Waiter]:
        old = self._values.get(key)
        if old is None:
            return self.set(key, value)
        self._room(key, len(old) + len(value), len(value))
        if not isinstance(old, bytearray):  # so that many appends do not each copy a large value
            old = self._values[key] = bytearray(old)
        old += value
        return []

    def delete(self, key: bytes) -> bool:
        value = self._values.pop(key, None)
        if value is not None:
            self.num_bytes -= len(key) + len(value) + _OVERHEAD_BYTES
        return value is not None

    def keys(self, prefix: bytes = b"") -> list[bytes]:
        """Return the keys that start with `prefix`, in the order of their creation."""
        return [key for key in self._values if key.startswith(prefix)]

    def push(self, queue: bytes, value: bytes) -> list[Waiter]:
        """Append to a queue. If a client waits for an item, one waiter becomes ready: call `pop` for it."""
        self._room(queue, len(value), len(queue) + len(value) + _OVERHEAD_BYTES)
        self._queues.setdefault(queue, deque()).append(value)
        return self._pop_ready(queue) if queue in self._waiters else []

    def push_back(self, queue: bytes, value: bytes) -> list[Waiter]:
        """Put an item that its caller did not receive back at the front of its queue, even beyond the limit.

        Return the waiters that became ready, as `push` does.
        """
        self.num_bytes += len(queue) + len(value) + _OVERHEAD_BYTES
        self._queues.setdefault(queue, deque()).appendleft(value)
        return self._pop_ready(queue) if queue in self._waiters else []

    def pop(self, queue: bytes) -> bytes | None:
        """Remove and return the oldest item of a queue; None if the queue is empty."""
        items = self._queues.get(queue)
        if items is None:
            return None
        value = items.popleft()
        if not items:
            del self._queues[queue]
        self.num_bytes -= len(queue) + len(value) + _OVERHEAD_BYTES
        return value

    def restore_item(self, queue: bytes, value: bytes) -> None:
        """Restore an item of another store's queue, even beyond the limit: items that were put back may exceed it."""
        self.num_bytes += len(queue) + len(value) + _OVERHEAD_BYTES
        self._queues.setdefault(queue, deque()).append(value)

    def queues(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield each queue with its items."""
        for queue, items in self._queues.items():
            yield queue, list(items)

    def queue_len(self, queue: bytes) -> int:
        """Return the number of items in a queue."""
        return len(self._queues.get(queue, ()))

    def wait(self, waiter: Waiter) -> bool:
        """Keep `waiter` until it is ready; return False, without keeping it, if it is ready now."""
        if waiter.queue is not None:
            if waiter.queue in self._queues:
                return False
            self._waiters.setdefault(waiter.queue, {})[waiter] = None
            return True
        there = self.has if waiter.accepts_queues else self._has_values
        waiter.missing = {key for key in waiter.keys if not there((key,))}
        for key in waiter.missing:
            self._waiters.setdefault(key, {})[waiter] = None
        return bool(waiter.missing)

    def release(self, key: bytes) -> list[Waiter]:
        """Remove and return the waiters for a key that is never set."""
        return self._pop_ready(key) if key in self._waiters else []

    def forget(self, waiter: Waiter) -> None:
        """Remove `waiter`, whose request no longer waits."""
        for key in waiter.missing if waiter.queue is None else (waiter.queue,):
            waiters = self._waiters.get(key, {})
            waiters.pop(waiter, None)
            if not waiters:
                self._waiters.pop(key, None)

    def _pop_ready(self, key: bytes) -> list[Waiter]:
        waiters = self._waiters[key]
        ready, takers = [], self.queue_len(key)
        for waiter in list(waiters):
            if waiter.queue is not None:
                if not takers:
                    continue
                takers -= 1
                ready.append(waiter)
            elif waiter.accepts_queues or key in self._values:
                waiter.missing.discard(key)
                if not waiter.missing:
                    ready.append(waiter)
            else:
                continue
            del waiters[waiter]
        if not waiters:
            del self._waiters[key]
        return ready

    def _room(self, key: bytes, value_bytes: int, grows: int) -> None:
        _check_lengths(key, value_bytes)
        if self.num_bytes + grows > self.max_bytes:
            self._full()
        self.num_bytes += grows

    def _full(self) -> None:
        raise RefusedError(
            f"the job's store is full: {len(self._values)} keys, {self.num_bytes} bytes, of {self.max_bytes}"
        )


def _check_lengths(key: bytes, value_bytes: int) -> None:
    if len(key) > MAX_KEY_BYTES:
        raise RefusedError(f"a key of {len(key)} bytes; the longest may have {MAX_KEY_BYTES}")
    if value_bytes > MAX_VALUE_BYTES:
        raise RefusedError(
            f"the value of {_shown(key)} would have {value_bytes} bytes; the longest may have {MAX_VALUE_BYTES}"
        )


def _shown(key: bytes) -> str:
    return repr(key[:200].decode(errors="replace"))
