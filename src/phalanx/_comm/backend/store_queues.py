"""Provide queues for torch's FileStore, which has none; the job's store under `phalanx run` is a FileStore.

push     add  <key>/pushed             = i + 1, and  set  <key>/<i>
pop      compare_set  <key>/popped     from "i <token>" to "i + 1 <a token of mine>": item i is mine, get and delete it
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx._base.deadline import Deadline

_LONGEST_PAUSE_S = 0.02


def push(store: Any, key: str, value: str | bytes) -> None:
    """Append `value` to the queue `key`, as `Store.queue_push` does."""
    number = store.add(_pushed(key), 1) - 1
    store.set(_item(key, number), value)


def pop(store: Any, key: str, timeout: timedelta, block: bool = True) -> bytes:
    """Remove the oldest value of the queue `key` and return it, as `Store.queue_pop` does.

    Raises:
        QueueEmptyError: the queue is empty, and `block` is False.
        DistStoreError: the queue stayed empty for `timeout`.
    """
    deadline, pause_s = Deadline.after(timeout), 0.0005
    while True:
        before = _read(store, _popped(key))
        number = int(before.partition(" ")[0] or 0)
        if number < int(_read(store, _pushed(key)) or 0):
            mine = f"{number + 1} {uuid.uuid4()}"
            if store.compare_set(_popped(key), before, mine) == mine.encode():
                value: bytes = store.get(_item(key, number))  # the process that counted it is about to set it
                store.delete_key(_item(key, number))
                return value
            continue
        if not block:
            raise dist.QueueEmptyError(f"queue {key!r} is empty")
        if deadline.passed:
            raise dist.DistStoreError(f"queue_pop: queue {key!r} stayed empty for {deadline.timeout_s:.1f} s")
        time.sleep(min(pause_s, deadline.left_s))
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def length(store: Any, key: str) -> int:
    """Return how many values are in the queue, as `Store.queue_len` does."""
    popped = int(_read(store, _popped(key)).partition(" ")[0] or 0)
    return int(_read(store, _pushed(key)) or 0) - popped


def _read(store: Any, key: str) -> str:
    """Return the value of `key`, or ""; unlike `add(key, 0)`, this does not make the file grow."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def _pushed(key: str) -> str:
    return f"{key}/queue/pushed"


def _popped(key: str) -> str:
    return f"{key}/queue/popped"


def _item(key: str, number: int) -> str:
    return f"{key}/queue/{number}"
