"""Append to keys of torch's FileStore, whose own append loses values; `phalanx run` keeps the job's keys in one.

torch's is compare_set(key, old, old + value), and takes the answer old + value for success. That is also the answer
where another rank has appended an equal value in between, or where `value` is all that the key has.

claim       compare_set  <key>/appending   from what was read there to "<token> <length of old> <old + value>"
carry out   compare_set  <key>             from old to old + value; another rank does it if it finds the claim
release     compare_set  <key>/appending   from the claim to "<token>"

No rank waits for another: a claim whose rank has died is carried out by the next that appends.
"""

from __future__ import annotations

import uuid
from typing import Any


def append(store: Any, key: str, value: str | bytes) -> None:
    """Append `value` to the value of `key`, as `Store.append` does; each of many ranks' values is there once."""
    added = value.encode() if isinstance(value, str) else value
    claims = f"{key}/appending"
    while True:
        last = _read(store, claims)
        if b" " in last:
            _carry_out(store, key, last)
            _release(store, claims, last)
            continue
        old = _read(store, key)
        mine = b"%s %d %s" % (str(uuid.uuid4()).encode(), len(old), old + added)
        if store.compare_set(claims, last, mine) == mine:
            value_now = _carry_out(store, key, mine)
            _release(store, claims, mine)
            if value_now.startswith(old + added):  # else somebody has set the key since it was read
                return


def _carry_out(store: Any, key: str, claim: bytes) -> bytes:
    """Make the change of `claim` if nobody has, and return the value that the key has then."""
    _, length, new = claim.split(b" ", 2)
    value: bytes = store.compare_set(key, new[: int(length)], new)
    return value


def _release(store: Any, claims: str, claim: bytes) -> None:
    """Say that a claim was carried out; another rank may have said so, and made its own."""
    store.compare_set(claims, claim, claim.partition(b" ")[0])


def _read(store: Any, key: str) -> bytes:
    """Return a value, or nothing where the key is not there."""
    value: bytes = store.get(key) if store.check([key]) else b""
    return value
