"""Notify ranks of published failures and of requests for their positions, for all groups of a store at once.

    phalanx/signal/<n>    the n-th signal: the key of the group whose part of the store must be read
    phalanx/signals       the number from which to search for the next signal

A rank with many groups waits for one key only. If the store can notify (the coordinator of `phalanx run` on several
hosts), nothing is sent until there is a signal; the ranks of a host share one wait, in their agent's relay.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, Protocol, TypeVar, runtime_checkable

from phalanx._base.threads import call_in_thread
from phalanx.errors import PhalanxError

T = TypeVar("T")

_NEXT = "phalanx/signals"
_ANSWER_S = 2.0


class AwaitedValue(Protocol):
    """An `AwaitedValue` is a pending request for a key, which the store answers when the key is set."""

    def poll(self) -> bytes | None:
        """Return the value, or None if it has not arrived. Nothing is sent.

        Raises:
            RuntimeError: the connection is lost.
        """

    def cancel(self) -> None:
        """Cancel the request."""


@runtime_checkable
class NotifyingStore(Protocol):
    """A `NotifyingStore` answers when a key has been set, so that it need not be polled."""

    def begin_get(self, key: str) -> AwaitedValue:
        """Request a key that may be set later."""


class FailureSignals:
    """`FailureSignals` are the signals in `store`, shared by all groups of the job; their keys end with `suffix`.

    All calls are best effort: a store that does not answer is not queried again. (If its host was cut off, torch's
    client would wait for a quarter of an hour.)
    """

    def __init__(self, store: Any, suffix: str = "") -> None:
        self.store = store  # groups compare stores by this object
        self._suffix = suffix
        self.connection = store.clone()  # a blocking call on a connection delays the others on it
        self._next: int | None = None
        self._waiting: AwaitedValue | None = None
        self.is_store_lost = False

    def query(self, request: Callable[[], T], default: T) -> T:
        """Return the store's answer to `request`; `default` if it fails or takes over two seconds, or did so before."""
        if self.is_store_lost:
            return default
        try:
            answer = call_in_thread(request, "phalanx-failure-store")
        except PhalanxError:  # no thread can start while the interpreter exits
            self.is_store_lost = True
            return default
        for _ in range(2):  # if this process is stopped during the first wait, the second gives the answer time
            wait([answer], _ANSWER_S / 2)
        self.is_store_lost = not answer.done() or answer.exception() is not None
        return default if self.is_store_lost else answer.result()

    def send(self, group_key: str) -> None:
        """Signal all ranks to read this group's part of the store."""
        self.query(lambda: self._send(group_key), None)

    def _send(self, group_key: str) -> None:
        number, mine = self._first(), f"{os.urandom(8).hex()} {group_key}"
        # repeat while another rank has taken the number
        while self.connection.compare_set(self._key(number), "", mine).decode() != mine:
            number += 1
        self.connection.set(_NEXT, str(number + 1))

    def _key(self, number: int) -> str:
        return f"phalanx/signal/{number}{self._suffix}"

    def _first(self) -> int:
        return int(self.connection.get(_NEXT)) if self.connection.check([_NEXT]) else 0

    def receive(self) -> set[str]:
        """Return the keys of the groups that were signalled since the last call."""
        if self._next is None:
            first = self.query(self._first, -1)
            if first < 0:
                return set()
            self._next = first
        if isinstance(self.connection, NotifyingStore):
            return self._receive_arrived(self._next, self.connection)
        return self._receive_all(self._next)

    def _receive_all(self, number: int) -> set[str]:
        def receive() -> set[str]:
            keys: set[str] = set()
            there = number
            while self.connection.check([self._key(there)]):
                keys.add(_group_key(self.connection.get(self._key(there))))
                there += 1
            self._next = there
            return keys

        return self.query(receive, set())

    def _receive_arrived(self, number: int, store: NotifyingStore) -> set[str]:
        """Return the result of `_receive_all` from a store that notifies."""
        keys: set[str] = set()
        try:
            while not self.is_store_lost:
                if self._waiting is None:
                    self._waiting = store.begin_get(self._key(number))
                value = self._waiting.poll()
                if value is None:
                    break
                self._waiting.cancel()
                self._waiting = None
                keys.add(_group_key(value))
                number = self._next = number + 1
        except (RuntimeError, ValueError):  # the connection is lost, or the store refuses
            self.is_store_lost = True
        return keys

    def close(self) -> None:
        """Stop waiting for a key."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            with contextlib.suppress(RuntimeError):
                waiting.cancel()


def _group_key(value: bytes) -> str:
    return value.decode().partition(" ")[2]
