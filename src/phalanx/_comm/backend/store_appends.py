"""Append to keys of torch's FileStore, whose own append loses values. The store of `phalanx run` is a FileStore.

torch's append is compare_set(key, old, old + value), and takes the result old + value for success. But compare_set also
returns old + value if another rank has appended an equal value in between, or if `value` is the key's whole value.

claim       compare_set  <key>/appending   from the value read to "<token> <length of old> <old + value>"
carry out   compare_set  <key>             from old to old + value; another rank does it if it finds the claim
release     compare_set  <key>/appending   from the claim to "<token>"

No rank waits for another: the next rank that appends carries out the claim of a rank that has died.
"""

from __future__ import annotations

import uuid
from typing import Any


def append(store: Any, key: str, value: str | bytes) -> None:
    """Append `value` to the value of `key`, as `Store.append` does; concurrent appends are each applied once."""
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
            if value_now.startswith(old + added):  # otherwise another process has set the key since it was read
                return


def _carry_out(store: Any, key: str, claim: bytes) -> bytes:
    """Apply the change of `claim` if no rank has done so, and return the key's value afterwards."""
    _, length, new = claim.split(b" ", 2)
    value: bytes = store.compare_set(key, new[: int(length)], new)
    return value


def _release(store: Any, claims: str, claim: bytes) -> None:
    """Record that `claim` was carried out, unless another rank has recorded that already and made its own claim."""
    store.compare_set(claims, claim, claim.partition(b" ")[0])


def _read(store: Any, key: str) -> bytes:
    """Return the value of `key`; b"" if there is none."""
    value: bytes = store.get(key) if store.check([key]) else b""
    return value
