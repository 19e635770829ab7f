"""Modes that count what a program does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Operators(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@contextmanager
def operators() -> Iterator[list[str]]:
    """Collect the names of the operators that a dispatch mode sees in the block."""
    names: list[str] = []
    with _Operators(names):
        yield names


@contextmanager
def functions() -> Iterator[list[str]]:
    """Collect the names of the functions of torch that a function mode sees in the block."""
    names: list[str] = []
    with _Functions(names):
        yield names
