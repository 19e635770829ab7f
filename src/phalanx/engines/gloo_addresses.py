"""How the ranks of a group tell each other where Gloo listens: together, and not each of each.

    every rank   set  addresses/<rank>   = what Gloo would have the others know of this rank
    rank 0       get  all of them        → set  addresses#once = all together
    every rank   get  addresses#once     → whatever Gloo asks for is there already

Gloo asks its store for each other rank by itself: 2N requests of each of N ranks, and 8N bytes of each for each. What
it writes is not read here; it is mostly a row of numbers that grow by one, which takes little room as such.
"""

from __future__ import annotations

import array
import itertools
import json
import struct
import sys
import threading
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from phalanx.coordination.wire import WRITE_ONCE

_TOGETHER = f"addresses{WRITE_ONCE}"  # ranks of one host fetch it once
_RUN = struct.Struct("<QI")
_WORD_BYTES = 8
_MODULUS = 1 << 64


class GlooAddresses(Store):
    """The store in which one rank's Gloo finds the others, over the `store` in which the group's ranks meet.

    Collective: `world_size` ranks use it, and each writes one value. Cost: 3 requests per rank of `store`, 3 more of
    rank 0.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()
        self._found: dict[str, bytes] | None = None  # by Gloo's own keys, as `compress` leaves them

    def set(self, key: str, value: str | bytes) -> None:
        """Let all ranks know this rank's value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(_key(self._rank), json.dumps([key, b64encode(compress(data)).decode()]))

    def get(self, key: str) -> bytes:
        """Return another rank's value; waits until all ranks have written theirs."""
        return decompress(self._find_all(None)[key])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ranks have written."""
        self._find_all(timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ranks have written, as far as was asked."""
        return self._found is not None and all(key in self._found for key in keys)

    def _find_all(self, timeout: timedelta | None) -> dict[str, bytes]:
        with self._lock:
            if self._found is None:
                if self._rank == 0:
                    self._put_together(timeout)
                else:
                    self._wait([_TOGETHER], timeout)
                pairs = json.loads(zlib.decompress(self._store.get(_TOGETHER)))
                self._found = {key: b64decode(data) for key, data in pairs}
            return self._found

    def _put_together(self, timeout: timedelta | None) -> None:
        keys = [_key(rank) for rank in range(self._world_size)]
        self._wait(keys, timeout)
        pairs = [json.loads(text) for text in self._store.multi_get(keys)]
        self._store.set(_TOGETHER, zlib.compress(json.dumps(pairs).encode()))

    def _wait(self, keys: list[str], timeout: timedelta | None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)


def _key(rank: int) -> str:
    return f"addresses/{rank}"


def compress(data: bytes) -> bytes:
    """Return the words of `data` as runs of equal differences, and what is left of a last word."""
    whole = len(data) // _WORD_BYTES * _WORD_BYTES
    words = array.array("Q", data[:whole])
    if sys.byteorder == "big":
        words.byteswap()
    differences = (
        (word - before) % _MODULUS for word, before in zip(words, itertools.chain((0,), words), strict=False)
    )
    runs = [(value, sum(1 for _ in same)) for value, same in itertools.groupby(differences)]
    return b"".join((struct.pack("<I", len(runs)), *(_RUN.pack(*run) for run in runs), data[whole:]))


def decompress(data: bytes) -> bytes:
    """Return what `compress` was given."""
    (num_runs,) = struct.unpack_from("<I", data)
    end = 4 + num_runs * _RUN.size
    words, word = array.array("Q"), 0
    for value, count in _RUN.iter_unpack(data[4:end]):
        for _ in range(count):
            word = (word + value) % _MODULUS
            words.append(word)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes() + data[end:]
