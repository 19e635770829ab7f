"""Pack keys and values into bytes, a column of each. Columns of only str, bytes, int or float need no pickle.

    t b 10          the kinds of the two columns, and the length of the first
    a·the·word      keys: text, separated by line ends
    3 99 2          values: integers of one byte each

Lists of values are packed as a column of their lengths, then a column of all values.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

HEADER = 10
_BORDER = b"\n"
_WIDTHS = (("b", 8), ("h", 16), ("i", 32))


def pack(keys: Sequence[Any], values: Sequence[Any], *, listed: bool = False) -> bytes:
    """Pack keys and as many values (with `listed`: lists of values) into bytes. Types are kept exactly.

    Cost: a pickled column is copied once more.
    """
    first = _pack_column(keys)
    if not listed:
        return b"".join(_joined(first, _pack_column(values)))
    counts = _pack_column([len(one) for one in values])
    inner = _joined(counts, _pack_column([*chain.from_iterable(values)]))
    return b"".join([*_joined(first, (b"l", b"")), *inner])


def unpack(data: bytes | memoryview) -> tuple[list[Any], list[Any]]:
    """Unpack the keys and values."""
    kind, keys, column = _split(data)
    if kind[1:] != b"l":
        return _unpack_column(kind[:1], keys), _unpack_column(kind[1:], column)
    counts, rest = unpack(column)
    # A slice allocates no more than its items need; a list made from an iterator would have spare room.
    lists = [rest[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
    return _unpack_column(kind[:1], keys), lists


def length_of_keys(head: bytes) -> int:
    """Return the offset of the values, which follow header and keys, from the first `HEADER` or more bytes."""
    return HEADER + int.from_bytes(head[2:HEADER], "little")


def unpack_keys(data: bytes) -> list[Any]:
    """Unpack only the keys."""
    return _unpack_column(data[:1], memoryview(data)[HEADER:])


def _joined(first: tuple[bytes, bytes], second: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    return first[0], second[0], len(first[1]).to_bytes(8, "little"), first[1], second[1]


def _split(data: bytes | memoryview) -> tuple[bytes, memoryview, memoryview]:
    view = memoryview(data)
    border = length_of_keys(bytes(view[:HEADER]))
    return bytes(view[:2]), view[HEADER:border], view[border:]


def _pack_column(items: Sequence[Any]) -> tuple[bytes, bytes]:
    types = set(map(type, items))
    if len(types) == 1:
        try:
            if pack_one := _PACK.get(types.pop()):
                kind, data = pack_one(items)
                if data is not None:
                    return kind, data
        except OverflowError:  # an integer has more than 64 bits
            pass
    try:
        return b"p", pickle.dumps(list(items), protocol=5)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise TypeError(f"map_reduce: {_find_bad(items)} cannot be sent to another rank or to disk: {error}") from error


def _find_bad(items: Sequence[Any]) -> str:
    for item in items:
        try:
            pickle.dumps(item, protocol=5)
        except Exception:
            return f"{item!r:.100} of type {type(item).__name__}"
    return "a key or value"


def _pack_text(items: Sequence[str]) -> tuple[bytes, bytes | None]:
    data = "\n".join(items).encode("utf-8", "surrogatepass")
    return b"t", data if data.count(_BORDER) == len(items) - 1 else None


def _pack_bytes(items: Sequence[bytes]) -> tuple[bytes, bytes | None]:
    data = _BORDER.join(items)
    return b"B", data if data.count(_BORDER) == len(items) - 1 else None


def _pack_numbers(items: Sequence[int]) -> tuple[bytes, bytes]:
    least, most = min(items), max(items)
    code = next((code for code, bits in _WIDTHS if -1 << (bits - 1) <= least and most < 1 << (bits - 1)), "q")
    return code.encode(), array(code, items).tobytes()


_PACK: dict[type, Callable[[Any], tuple[bytes, bytes | None]]] = {
    str: _pack_text,
    bytes: _pack_bytes,
    int: _pack_numbers,
    float: lambda items: (b"d", array("d", items).tobytes()),
}


def _unpack_column(kind: bytes, data: memoryview) -> list[Any]:
    if kind == b"t":
        return str(data, "utf-8", "surrogatepass").split("\n")
    if kind == b"B":
        return bytes(data).split(_BORDER)
    if kind == b"p":
        found: list[Any] = pickle.loads(data)
        return found
    return array(kind.decode(), bytes(data)).tolist()
