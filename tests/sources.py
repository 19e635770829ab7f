"""The package's sources, as trees: each file is parsed once in a process."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path


@functools.cache
def tree(module: Path) -> ast.Module:
    """The tree of a file. Millions of nodes stay, and looking for garbage among them took most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(module.read_text(), str(module))
    finally:
        if was_enabled:
            gc.enable()
