"""Assign keys to partitions, the same ones on every rank and in every run, and check that keys have an order.

Python's own hash of a string differs between processes. Equal keys must have equal hashes: 1, 1.0 and True are the same
key in a dict, so they are the same key here.
"""

from __future__ import annotations

import datetime
import enum
import numbers
import uuid
from collections.abc import Collection, Iterable
from pathlib import PurePath, PureWindowsPath
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
_NAMED = 6
_PLAIN = frozenset((str, bytes, tuple, int, float))


def stable_hash(key: Any) -> int:
    """Return a hash of `key` that is the same in every process; equal keys have equal hashes.

    Raises:
        TypeError: keys of this type have no hash that is the same in every process.
        ValueError: the key is not equal to itself (NaN).
    """
    if isinstance(key, enum.Enum) and not isinstance(key, str | int):
        return crc32(f"{type(key).__qualname__}.{key.name}".encode())
    if type(key) not in _PLAIN:
        _require_plain_equality(key)
    if isinstance(key, str):
        return crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return crc32(key)
    if isinstance(key, numbers.Number) and key != key:
        raise ValueError("map_reduce: NaN cannot be a key: it is not equal to itself")
    if isinstance(key, numbers.Real):
        return _mix(hash(key))  # hashes of numbers are not randomised, and do not depend on the type
    if key is None:
        return 1
    if isinstance(key, tuple):
        number = len(key)
        for item in key:
            number = _mix(number * 31 + stable_hash(item))
        return number
    if isinstance(key, datetime.datetime):
        return _mix(crc32(key.isoformat().encode()) if key.tzinfo is None else hash(key.timestamp()))
    if isinstance(key, datetime.date):
        return _mix(key.toordinal())
    if isinstance(key, uuid.UUID):
        return _mix(key.int)
    if isinstance(key, PureWindowsPath):  # such paths compare case-insensitively
        return crc32(str(key).lower().encode("utf-8", "surrogatepass"))
    if isinstance(key, PurePath):
        return crc32(str(key).encode("utf-8", "surrogateescape"))
    if isinstance(key, numbers.Number) and hasattr(key, "as_tuple"):  # Decimal, which is not a Real
        return _mix(hash(key))
    raise TypeError(
        f"map_reduce: {key!r:.80} of type {type(key).__name__} cannot be a key.\n"
        "Use strings, bytes, numbers, None, dates, UUIDs, paths, or tuples of those."
    )


def _require_plain_equality(key: Any) -> None:
    """Raise TypeError if the key's class is derived from str, bytes or tuple and defines its own equality."""
    for base in (str, bytes, tuple):
        if isinstance(key, base) and type(key).__eq__ is not base.__eq__ and not isinstance(key, np.generic):
            raise TypeError(
                f"map_reduce: {key!r:.80} of type {type(key).__name__} cannot be a key: the class defines its own "
                f"equality, so equal keys could be in different partitions.\n"
                f"Let map yield a plain {base.__name__} that is the same for equal keys."
            )


def _mix(number: int) -> int:
    """Spread differences in the high bits, as between the hashes of 1/2 and 1/4, over the low bits."""
    number = (number & _MASK) * _MIX & _MASK
    return number >> 32


def partitions_of(keys: Collection[Any], types: set[type], count: int) -> npt.NDArray[Any]:
    """Return the partition of each key, as uint16 if possible, which sorts fastest."""
    hashes: npt.NDArray[np.uint32] | None = None
    if types == {str}:
        try:
            hashes = np.fromiter(map(crc32, map(str.encode, keys)), np.uint32, len(keys))
        except UnicodeEncodeError:  # the key has an unpaired surrogate
            pass
    if hashes is None:
        hashes = np.fromiter(map(stable_hash, keys), np.uint32, len(keys))
    return (hashes % count).astype(np.uint16 if count <= 1 << 16 else np.uint32)


_NO_ORDER = ", whose objects cannot be compared"


def find_kinds(types: Iterable[type]) -> set[str]:
    """Return the kinds of keys among `types`. Only keys of one kind can be compared with each other."""
    return {_kind_of(one) for one in types}


def _kind_of(one: type) -> str:
    for base, name in ((str, "str"), (bytes, "bytes"), (tuple, "tuple"), (numbers.Number, "number")):
        if issubclass(one, base):
            return name
    has_order = any(getattr(one, name) is not vars(object)[name] for name in ("__lt__", "__gt__"))
    is_single = one is type(None)  # None is the only object of its type, and needs no order
    return one.__name__ + ("" if has_order or is_single else _NO_ORDER)


def require_order(kinds: Collection[str]) -> None:
    """Raise if keys of these kinds have no order. All ranks pass the kinds of all ranks, so that all raise or none.

    Raises:
        TypeError: keys of several kinds, or of a class without `<`, have no order.
    """
    for kind in sorted(kinds):
        if kind.endswith(_NO_ORDER):
            raise TypeError(
                f"map_reduce: keys cannot be sorted: a {kind}.\n"
                "Let map yield sortable keys: key.value or key.name of an Enum, numbers, strings, or tuples of these."
            )
    if len(kinds) > 1:
        named = ", ".join(sorted(kinds)[:_NAMED])
        raise TypeError(
            f"map_reduce: keys of different kinds cannot be sorted: {named}.\n"
            "Let map yield keys of one kind, such as (kind, key) tuples or str(key)."
        )
