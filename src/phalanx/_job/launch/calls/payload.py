"""Encode a function and its arguments as bytes: by value (cloudpickle) if the ranks cannot import them.

Functions, closures, lambdas and classes of `__main__` and of a notebook are sent by value. Those of modules are sent by
name, and the ranks get the caller's module search path. The source of a notebook's cells is sent for tracebacks.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def encode(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return the call as bytes for `decode` in another process. Copies the arguments once.

    Raises:
        TypeError: the function or an argument cannot be pickled; the message names it.
    """
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps((fn, tuple(args), dict(kwargs))))
    except Exception as error:
        blamed = _find_unpicklable(fn, args, kwargs) or "the function or its arguments"
        raise TypeError(f"{blamed} cannot be sent to other processes: {type(error).__name__}: {error}") from error


def decode(data: bytes) -> Call:
    """Decode the result of `encode`.

    Raises:
        Exception: an import that unpickling needs has failed.
    """
    call: Call = pickle.loads(data)
    return call


def encode_value(value: object) -> bytes:
    """Encode a call's result so that plain `pickle.loads` can read it in the caller."""
    import cloudpickle

    return bytes(cloudpickle.dumps(value))


def encode_surroundings() -> bytes:
    """Encode this process's module search path, arguments and notebook cells for `restore_surroundings`."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    surroundings = {
        "path": list(sys.path),
        "argv": list(sys.argv),
        "main_file": None if spec is not None else getattr(main, "__file__", None),
        # The source of code without a file (a notebook's cell, a shell's input) exists only in this process.
        "lines": {
            name: entry
            for name, entry in linecache.cache.items()
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
        },
    }
    return pickle.dumps(surroundings)


def restore_surroundings(data: bytes) -> None:
    """Use the caller's module search path, arguments and `__main__` in this rank."""
    surroundings = pickle.loads(data)
    sys.path[:] = surroundings["path"]
    sys.argv[:] = surroundings["argv"]
    linecache.cache.update(surroundings["lines"])
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__")]:
        delattr(main, name)  # names of `calls/__main__.py`
    # Processes that the ranks spawn (DataLoader workers) import the caller's script, as in the caller.
    main.__spec__ = None
    main.__file__ = surroundings["main_file"]
    if main.__file__ is None:
        del main.__file__


def show_in_main(fn: Callable[..., Any]) -> None:
    """Add the globals of `fn` to `__main__`, so that plain pickle finds its classes (`all_gather_object`)."""
    fn = getattr(fn, "__func__", getattr(fn, "func", fn))  # the function of a bound method, or of a partial
    if getattr(fn, "__module__", None) == "__main__":
        main = vars(sys.modules["__main__"])
        main.update({k: v for k, v in getattr(fn, "__globals__", {}).items() if not k.startswith("__")})
        name = getattr(fn, "__qualname__", "")
        if name.isidentifier():
            main.setdefault(name, fn)


def _find_unpicklable(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Describe the smallest part that cannot be pickled; empty if there is none."""
    for name, part in _parts(fn, args, kwargs):
        if not _can_be_sent(part):
            return f"{name} (a {type(part).__name__})"
    return f"{_name(fn)}" if not _can_be_sent(fn) else ""


def _parts(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for i, value in enumerate(args):
        yield f"argument {i}", value
    for key, value in kwargs.items():
        yield f"argument {key!r}", value
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None) or ()
    if code is None:
        return
    for name, cell in zip(code.co_freevars, cells, strict=False):
        try:
            yield f"{name!r}, a variable around {_name(fn)}", cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    for name in code.co_names:
        if name in fn.__globals__:
            yield f"{name!r}, a global variable that {_name(fn)} uses", fn.__globals__[name]


def _can_be_sent(part: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(part)
    except Exception:
        return False
    return True


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
