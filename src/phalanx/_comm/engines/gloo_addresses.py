"""The ranks of a group tell each other together where Gloo listens, instead of each asking each.

    every rank   set  addresses/<n>      = what Gloo would have the others know of this rank
    rank 0       get  all of them        → set  addresses#once = all together
    every rank   get  addresses#once     → whatever Gloo asks for is there already

Gloo asks its store for each other rank by itself: 2N requests of each of N ranks, and 8N bytes of each for each. What
it writes is not read here; it is mostly a row of numbers that grow by one, which takes little room as such.
"""

from __future__ import annotations

import ctypes
import json
import struct
import threading
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from phalanx._comm.control.wire import WRITE_ONCE
from phalanx._comm.rendezvous.torch_store import base_of

_EACH, _NUM_WRITTEN = "addresses/", "addresses"
_TOGETHER = f"addresses{WRITE_ONCE}"  # ranks of one host fetch it once
_RUN = struct.Struct("<qI")
_WORD_BYTES = 8


class GlooAddresses(Store):
    """One rank's Gloo finds the others in it; `store` is the store in which the group's ranks meet.

    All of `world_size` ranks use it, and each writes one value. Cost: 3 requests per rank of `store`, 3 more of rank 0.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()
        self._found: dict[str, bytes] | None = None  # by Gloo's own keys, as `compress` leaves them

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        text = json.dumps([key, b64encode(compress(data)).decode()])
        base = base_of(self._store)
        if hasattr(base, "add_item"):  # with those of other ranks of this host, where that goes
            base.add_item(*(base.name_through(self._store, name) for name in (_NUM_WRITTEN, _EACH)), text)
        else:
            self._store.set(f"{_EACH}{self._rank}", text)

    def get(self, key: str) -> bytes:
        """Return another rank's value; this waits until all ranks have written theirs."""
        return decompress(self._find_all(None)[key])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ranks have written."""
        self._find_all(timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ranks have written, as far as was asked."""
        return self._found is not None and all(key in self._found for key in keys)

    def _find_all(self, timeout: timedelta | None) -> dict[str, bytes]:
        with self._lock:
            if self._found is None:
                if self._rank == 0:
                    self._put_together(timeout)
                else:
                    self._wait([_TOGETHER], timeout)
                self._found = unpack_all(self._store.get(_TOGETHER))
            return self._found

    def _put_together(self, timeout: timedelta | None) -> None:
        keys = [f"{_EACH}{number}" for number in range(self._world_size)]  # they may be in any order
        self._wait(keys, timeout)
        self._store.set(_TOGETHER, pack_all(self._store.multi_get(keys)))

    def _wait(self, keys: list[str], timeout: timedelta | None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)


def pack_all(texts: Sequence[bytes]) -> bytes:
    """Return what all ranks have written as one value."""
    return zlib.compress(b"[" + b",".join(texts) + b"]")


def unpack_all(data: bytes) -> dict[str, bytes]:
    """Return what each rank's Gloo has written, as `compress` left it, by Gloo's key."""
    return {key: b64decode(text) for key, text in json.loads(zlib.decompress(data))}


def compress(data: bytes) -> bytes:
    """Return the words of `data` as runs of equal differences, and what is left of a last word."""
    whole = len(data) // _WORD_BYTES * _WORD_BYTES
    words = torch.frombuffer(bytearray(bytes(_WORD_BYTES) + data[:whole]), dtype=torch.int64)
    values, counts = torch.unique_consecutive(torch.diff(words), return_counts=True)
    runs = b"".join(map(_RUN.pack, values.tolist(), counts.tolist()))
    return struct.pack("<I", len(values)) + runs + data[whole:]


def decompress(data: bytes) -> bytes:
    """Return what `compress` was given."""
    (num_runs,) = struct.unpack_from("<I", data)
    end = 4 + num_runs * _RUN.size
    runs = torch.tensor([*_RUN.iter_unpack(data[4:end])], dtype=torch.int64).reshape(-1, 2)
    words = torch.repeat_interleave(runs[:, 0], runs[:, 1]).cumsum(0)
    return ctypes.string_at(words.data_ptr(), len(words) * _WORD_BYTES) + data[end:]
