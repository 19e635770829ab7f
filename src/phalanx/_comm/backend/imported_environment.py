"""Import a part of torch, and take back the environment variables that its import sets for all child processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR",)  # torch sets it again where it compiles


@contextmanager
def environment_kept() -> Iterator[None]:
    """Take back, at the end, what torch's compiler has set in the environment meanwhile."""
    before = {name: os.environ.get(name) for name in _SET_BY_IMPORTS}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
