"""Fold pairs into a dict, the inner loop of a map task. It is in C where the core was built, a quarter quicker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["fold_in_python", "fold_pairs"]

_missing = object()


def fold_in_python(
    values: dict[Any, Any],
    mapped: Iterator[Iterable[Any]],
    combine: Callable[[Any, Any], Any] | None,
    adds: bool,
    limit: int,
    progress: list[Any],
) -> None:
    """Do exactly what `fold_pairs` of csrc/py_fold.c does."""
    records = count = 0
    progress[2] = None
    try:
        for one in mapped:
            pairs = list(one)
            try:
                if combine is None:
                    _list(values, pairs)
                elif adds:
                    _add(values, pairs)
                else:
                    _combine(values, pairs, combine)
            except BaseException:
                progress[2] = pairs
                raise
            records += 1
            count += len(pairs)
            if count >= limit:
                break
    finally:
        progress[:2] = records, count


def _list(values: dict[Any, Any], pairs: list[Any]) -> None:
    get = values.get
    for key, value in pairs:
        old = get(key)
        if old is None:
            values[key] = [value]
        else:
            old.append(value)


def _add(values: dict[Any, Any], pairs: list[Any]) -> None:
    get, missing = values.get, _missing
    for key, value in pairs:
        old = get(key, missing)
        values[key] = value if old is missing else old + value


def _combine(values: dict[Any, Any], pairs: list[Any], combine: Callable[[Any, Any], Any]) -> None:
    get, missing = values.get, _missing
    for key, value in pairs:
        old = get(key, missing)
        values[key] = value if old is missing else combine(old, value)


try:
    from phalanx._core import fold_pairs
except ImportError:  # no compiler was found, or this is no Linux
    fold_pairs = fold_in_python
