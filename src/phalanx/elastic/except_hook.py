"""Keep torch's excepthook, which prints uncaught exceptions, from piling up while groups come and go.

`init_process_group` puts a hook of torch's around the one that there is: each line gets the rank in front. Each
generation would put one more around it, until a thousand are more than Python's stack holds, and nothing is printed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_TORCHS = "init_process_group.<locals>._distributed_excepthook"


@contextmanager
def one_except_hook() -> Iterator[None]:
    """Put torch's hook around the script's only once, although a default group is made while this is entered."""
    hook = sys.excepthook
    inner = _find_inner(hook)
    sys.excepthook = hook if inner is None else inner
    try:
        yield
    except BaseException:
        sys.excepthook = hook
        raise
    if inner is None:  # the script has put its own hook around torch's
        sys.excepthook = hook


def _find_inner(hook: Hook) -> Hook | None:
    """Return the hook that torch's hook was put around; None if `hook` is not torch's."""
    if getattr(hook, "__qualname__", "") != _TORCHS:
        return None
    inner: Hook | None = inspect.getclosurevars(hook).nonlocals.get("old_hook")
    return inner
