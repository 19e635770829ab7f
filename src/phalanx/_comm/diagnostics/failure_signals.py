"""Signals tell ranks of a posted failure, or of a rank that asks where all are: one key at a time, for all groups.

    phalanx/signal/<n>    the n-th signal: the key of the group in whose part of the store there is something to read
    phalanx/signals       a number from which to look for the next one

A rank with many groups waits for one key, and where the store can wait (the coordinator of `phalanx run` on several
hosts) nothing is sent until something has happened; the ranks of a host wait together, in their agent's relay.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")

_NEXT = "phalanx/signals"
_ANSWER_S = 2.0


class AwaitedValue(Protocol):
    """A store was asked for this key, and tells when it has come."""

    def look(self) -> bytes | None:
        """Return the value; None if it has not come. Nothing is sent.

        Raises:
            RuntimeError: the connection is gone.
        """

    def cancel(self) -> None:
        """Wait for the key no more."""


@runtime_checkable
class NotifyingStore(Protocol):
    """It is a store that tells when a key has come, so that it need not be asked again and again."""

    def begin_get(self, key: str) -> AwaitedValue:
        """Ask for a key that may come later."""


class FailureSignals:
    """These are the signals in `store`, which all groups of the job share; their keys end with `suffix`.

    All of it is best effort: a store that does not answer (its host was cut off: torch's client would wait for a
    quarter of an hour) is not asked again.
    """

    def __init__(self, store: Any, suffix: str = "") -> None:
        self.store = store  # the groups know the store by this object
        self._suffix = suffix
        self.connection = store.clone()  # a call that waits in one keeps those of the other waiting
        self._next: int | None = None
        self._waiting: AwaitedValue | None = None
        self.is_store_gone = False

    def ask(self, question: Callable[[], T], default: T) -> T:
        """Return what the store answers to `question`; `default` if it takes over two seconds, or has before."""
        if self.is_store_gone:
            return default
        answers: list[T] = []
        thread = threading.Thread(target=_ask, args=(question, answers), name="phalanx-failure-store", daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        self.is_store_gone = not answers
        return answers[0] if answers else default

    def send(self, group_key: str) -> None:
        """Let all ranks look into the store for what is there for this group."""
        self.ask(lambda: self._send(group_key), None)

    def _send(self, group_key: str) -> None:
        number, mine = self._first(), f"{os.urandom(8).hex()} {group_key}"
        # another rank took this number
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
            first = self.ask(self._first, -1)
            if first < 0:
                return set()
            self._next = first
        if isinstance(self.connection, NotifyingStore):
            return self._take_arrived(self._next, self.connection)
        return self._take_all(self._next)

    def _take_all(self, number: int) -> set[str]:
        def take() -> set[str]:
            keys: set[str] = set()
            there = number
            while self.connection.check([self._key(there)]):
                keys.add(_group_key(self.connection.get(self._key(there))))
                there += 1
            self._next = there
            return keys

        return self.ask(take, set())

    def _take_arrived(self, number: int, store: NotifyingStore) -> set[str]:
        """Return what `_take_all` returns, where the store itself waits for the next key and tells."""
        keys: set[str] = set()
        try:
            while not self.is_store_gone:
                if self._waiting is None:
                    self._waiting = store.begin_get(self._key(number))
                value = self._waiting.look()
                if value is None:
                    break
                self._waiting.cancel()
                self._waiting = None
                keys.add(_group_key(value))
                number = self._next = number + 1
        except (RuntimeError, ValueError):  # the connection is gone, or the store refuses
            self.is_store_gone = True
        return keys

    def close(self) -> None:
        """Wait for no key any more."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            with contextlib.suppress(RuntimeError):
                waiting.cancel()


def _ask(question: Callable[[], T], answers: list[T]) -> None:
    with contextlib.suppress(RuntimeError):
        answers.append(question())


def _group_key(value: bytes) -> str:
    return value.decode().partition(" ")[2]
