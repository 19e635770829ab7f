"""Functions that run in several threads at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def map_in_threads(fn: Callable[[Argument], Result], arguments: Iterable[Argument]) -> list[Result]:
    """Call `fn` with all arguments at once, each in a thread; return what the calls returned.

    Raises:
        BaseException: what the first call that failed raised, when all have ended.
    """
    given = list(arguments)
    with ThreadPoolExecutor(max(1, len(given)), thread_name_prefix="phalanx-test") as pool:
        return list(pool.map(fn, given))
