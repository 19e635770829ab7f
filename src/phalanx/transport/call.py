"""What a rank says that it calls, in a few bytes: ranks compare them before data moves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.diagnostics.failure_report import RankCall
from phalanx.dtypes import dtype_name, reduction_name

# A block: the digest, the words, and what the rank brings, if it is that little.
BLOCK_BYTES = 512
PAYLOAD_BYTES = 256
_DIGEST_BYTES = 16
_HEAD_BYTES = BLOCK_BYTES - PAYLOAD_BYTES
_SEPARATOR = "\x1f"
_MAX_PLACE_BYTES = 120  # the end of a longer path, so that there is room for the rest


@dataclass(frozen=True)
class Call:
    """One collective as its rank called it. `sizes`: what else must be the same everywhere; `place`: file and line."""

    name: str
    dtype: int = -1
    redop: int = -1
    root: int = -1
    count: int = -1
    sizes: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    place: str = ""

    def words(self) -> str:
        """For people, in three fields: 'all_reduce', 'train.py:88', '(SUM) of float32 (3, 4)'."""
        options = [reduction_name(self.redop)] if self.redop >= 0 else []
        if self.root >= 0:
            options.append(f"{'src' if self.name in ('broadcast', 'scatter') else 'dst'}={self.root}")
        what = f"({', '.join(options)})" if options else ""
        if self.dtype >= 0:
            what += f" of {dtype_name(self.dtype)} {self.shape}"
        return _SEPARATOR.join((self.name, self.place.encode()[-_MAX_PLACE_BYTES:].decode(errors="ignore"), what))

    def block(self, seq: int, payload: bytes = b"") -> bytes:
        """A digest of what must agree, then the words, then `payload`; always `BLOCK_BYTES` long."""
        must_agree = (seq, self.name, self.dtype, self.redop, self.root, self.count, self.sizes)
        digest = hashlib.blake2b(repr(must_agree).encode(), digest_size=_DIGEST_BYTES).digest()
        head = digest + self.words().encode()[: _HEAD_BYTES - _DIGEST_BYTES]
        return (head.ljust(_HEAD_BYTES, b"\0") + payload).ljust(BLOCK_BYTES, b"\0")


def digest_of(block: bytes | bytearray) -> int:
    """The digest as a number."""
    return int.from_bytes(block[:_DIGEST_BYTES], "little")


def payload_of(block: bytes) -> bytes:
    """What its rank brings, and zeros."""
    return block[_HEAD_BYTES:]


def disagreement(blocks: Mapping[int, bytes], seq: int) -> dict[int, RankCall]:
    """What each rank called as its collective number `seq` if the ranks' calls differ; else nothing."""
    if len({block[:_DIGEST_BYTES] for block in blocks.values()}) <= 1:
        return {}
    return {r: _rank_call(block, seq) for r, block in sorted(blocks.items())}


def _rank_call(block: bytes, seq: int) -> RankCall:
    words = block[_DIGEST_BYTES:_HEAD_BYTES].rstrip(b"\0").decode(errors="replace")
    name, _, rest = words.partition(_SEPARATOR)
    place, _, what = rest.partition(_SEPARATOR)
    operation = f"{name} #{seq}"
    if not place:
        return RankCall(name + what, operation)
    return RankCall(f"{name}{what} at {place}", f"{operation} ({place})")


def split_blocks(data: bytes, ranks: Sequence[int]) -> dict[int, bytes]:
    """`ranks`' blocks, which lie one after the other in `data`."""
    return {r: data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i, r in enumerate(ranks)}
