"""Remove environment variables that an import of torch's compiler sets, which all child processes would inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR",)  # torch sets it again when it compiles


@contextmanager
def environment_preserved() -> Iterator[None]:
    """Remove, after the block, the environment variables that torch's compiler has set in it."""
    before = {name: os.environ.get(name) for name in _SET_BY_IMPORTS}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
