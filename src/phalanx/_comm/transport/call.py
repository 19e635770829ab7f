"""A `CollectiveCall` describes a rank's call in a few bytes, which the ranks compare before they move data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import Tensor

from phalanx._base.dtypes import dtype_name, dtype_of, reduction_name
from phalanx._comm.diagnostics.failure_report import RankCall

# A head ("header") consists of the digest, the sequence number and the text.
HEAD_BYTES = 256
_DIGEST_BYTES = 16
_SEQ_BYTES = 4
_SEPARATOR = "\x1f"
_MAX_PLACE_BYTES = 120  # a longer path loses its beginning, so that the rest of the text fits


@dataclass(frozen=True)
class CollectiveCall:
    """A `CollectiveCall` is one collective as its rank called it.

    `sizes` has further values that must be the same on every rank; `place` is 'file:line'.
    """

    name: str
    dtype: int = -1
    redop: int = -1
    root: int = -1
    count: int = -1
    sizes: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    place: str = ""

    def words(self) -> str:
        """Return the call as text, in three fields: 'all_reduce', 'train.py:88', '(SUM) of float32 (3, 4)'."""
        options = [reduction_name(self.redop)] if self.redop >= 0 else []
        if self.root >= 0:
            options.append(f"{'src' if self.name in ('broadcast', 'scatter') else 'dst'}={self.root}")
        what = f"({', '.join(options)})" if options else ""
        if self.dtype >= 0:
            what += f" of {dtype_name(self.dtype)} {self.shape}"
        return _SEPARATOR.join((self.name, self.place.encode()[-_MAX_PLACE_BYTES:].decode(errors="ignore"), what))

    def head(self, seq: int) -> bytes:
        """Return a digest of the compared fields, the number `seq` and the text, in exactly `HEAD_BYTES` bytes."""
        digest, words = self._common
        return digest + (seq & 0xFFFFFFFF).to_bytes(_SEQ_BYTES, "little") + words

    @cached_property
    def _common(self) -> tuple[bytes, bytes]:
        """Return the digest and the text that all heads of this call share."""
        must_agree = (self.name, self.dtype, self.redop, self.root, self.count, self.sizes)
        digest = hashlib.blake2b(repr(must_agree).encode(), digest_size=_DIGEST_BYTES - _SEQ_BYTES).digest()
        room = HEAD_BYTES - _DIGEST_BYTES
        return digest, self.words().encode()[:room].ljust(room, b"\0")


def compare_splits(sizes: Sequence[Sequence[Sequence[int]]]) -> dict[int, RankCall]:
    """Return the calls of the ranks whose sizes in an all_to_all do not match; an empty dict if all sizes match.

    sizes[r] has two lists: the bytes that rank r sends to each rank, and the bytes that it expects from each.
    """
    calls: dict[int, str] = {}
    for r, (sent, _) in enumerate(sizes):
        for peer, (_, awaited) in enumerate(sizes):
            if sent[peer] != awaited[r]:
                calls.setdefault(r, f"all_to_all that sends {sent[peer]} bytes to rank {peer}")
                calls.setdefault(peer, f"all_to_all that expects {awaited[r]} bytes from rank {r}")
    return {rank: RankCall(text) for rank, text in calls.items()}


class Disagreement(Exception):
    """The ranks' calls differ."""

    def __init__(self, calls: Mapping[int, RankCall], *, is_collective: bool = True) -> None:
        super().__init__(calls)
        self.calls = calls
        self.is_collective = is_collective


def describe_call(
    name: str,
    tensor: Tensor,
    place: str,
    *,
    redop: int = -1,
    root: int = -1,
    count: int | None = None,
    sizes: tuple[int, ...] = (),
) -> CollectiveCall:
    """Return the `CollectiveCall` of an operation with `tensor`; `count` defaults to the number of its elements.

    An argument is -1 if the operation lacks it, or if it may differ between ranks. Calls are cached with their
    heads, since a training loop repeats them.
    """
    count = tensor.numel() if count is None else count
    return _same_call(name, dtype_of(tensor.dtype).code, redop, root, count, sizes, tuple(tensor.shape), place)


@lru_cache(maxsize=1024)
def _same_call(
    name: str,
    dtype: int,
    redop: int,
    root: int,
    count: int,
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    place: str,
) -> CollectiveCall:
    return CollectiveCall(name, dtype, redop, root, count, sizes, shape, place)


def head_from_record(call: RankCall) -> bytes:
    """Return a head that matches no other call, for a rank whose current call is known only from its flight records."""
    digest = hashlib.blake2b(call.text.encode(), digest_size=_DIGEST_BYTES).digest()
    room = HEAD_BYTES - _DIGEST_BYTES
    text, _, place = call.text.partition(" at ")
    name = re.split(r"[( ]", text, maxsplit=1)[0]
    what = text[len(name) :]
    words = _SEPARATOR.join((name, place.encode()[-_MAX_PLACE_BYTES:].decode(errors="ignore"), what))
    return digest + words.encode()[:room].ljust(room, b"\0")


def digest_of(head: bytes | bytearray) -> int:
    """Return a number that almost certainly differs, even in its low bits, if the compared fields differ."""
    number = int.from_bytes(head[: _DIGEST_BYTES - _SEQ_BYTES], "little")
    seq = int.from_bytes(head[_DIGEST_BYTES - _SEQ_BYTES : _DIGEST_BYTES], "little")
    return number ^ seq * 0x9E3779B1


def agree(head: bytes, other: bytes) -> bool:
    """Return whether two ranks' calls match."""
    return head[:_DIGEST_BYTES] == other[:_DIGEST_BYTES]


def disagreement(heads: Mapping[int, bytes], seq: int) -> dict[int, RankCall]:
    """If the calls differ, return each rank's call, as collective number `seq`; otherwise return an empty dict."""
    if len({head[:_DIGEST_BYTES] for head in heads.values()}) <= 1:
        return {}
    return {r: rank_call(head, seq) for r, head in sorted(heads.items())}


def rank_call(head: bytes, seq: int) -> RankCall:
    """Return the call that a head describes, as collective number `seq`."""
    words = head[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")
    name, _, rest = words.partition(_SEPARATOR)
    place, _, what = rest.partition(_SEPARATOR)
    operation = f"{name} #{seq}"
    if not place:
        return RankCall(name + what, operation)
    return RankCall(f"{name}{what} at {place}", f"{operation} ({place})")


def split_heads(data: bytes, ranks: Sequence[int]) -> dict[int, bytes]:
    """Split `data` into the heads of `ranks`, by rank."""
    return {r: data[i * HEAD_BYTES : (i + 1) * HEAD_BYTES] for i, r in enumerate(ranks)}
