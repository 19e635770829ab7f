"""Patch modules that most programs never import, once a program imports them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def call_once_imported(name: str, change: Callable[[], None]) -> None:
    """Call `change` after the import of the module `name`; at once if it is already imported."""
    if name in sys.modules:
        change()
    else:
        sys.meta_path.insert(0, _Watch(name, change))


class _Watch(MetaPathFinder):
    """A `_Watch` finds one module through the other finders, and calls `change` after the module's first import."""

    def __init__(self, name: str, change: Callable[[], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec from the other finders; None for other modules."""
        if fullname != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._change()

        loader.exec_module = exec_module
        return spec
