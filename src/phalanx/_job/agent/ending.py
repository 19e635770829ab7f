"""End a rank as any Python program ends, but without taking the interpreter apart.

What the zygote has imported lies in pages that all ranks share. The interpreter, when it ends, visits every object of
every module once more to free it, and each visit copies a page: 8 ranks of 49 MB went up to 940 MB together, and 32
that did nothing but end took 20 s. So the rank does what the interpreter's end does for the program, in its order, and
leaves the rest to the kernel, which frees pages without looking into them.

    threads joined > atexit > the script's own modules let go (files closed, __del__) > streams flushed > _exit
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Collection
from types import ModuleType
from typing import Any


def can_end_quickly() -> bool:
    """Return whether neither the interpreter's own end nor that of the C libraries is needed."""
    if sys.flags.inspect or "LD_PRELOAD" in os.environ:  # a profiler that writes its results at the very end, perhaps
        return False
    if "mpi4py.MPI" in sys.modules:  # MPI is finalized by a hook below Python's
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def end_quickly(status: int, shared: Collection[str]) -> None:
    """End the process with `status`; to all others it looks like the interpreter's own end.

    `shared` are the modules that were there before the script: what they hold stays as it is. This returns only if the
    streams cannot be flushed: then the interpreter reports it in its own words, with its own exit code.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls; it joins all but the daemons
    except BaseException:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    gc.collect()
    # The interpreter stops daemon threads before it takes modules away from them. Here they go on, but only where this
    # thread waits, and nobody hears what becomes of them.
    sys.setswitchinterval(1e6)
    threading.excepthook = lambda _: None
    _let_go_of_modules(shared)
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        return
    ctypes.CDLL(None).fflush(None)  # this flushes what C libraries have printed
    os._exit(status)


def _let_go_of_modules(shared: Collection[str]) -> None:
    """Free what the script's modules hold, the latest first: open files are written, `__del__` runs."""
    names = [name for name in sys.modules if name not in shared or name == "__main__"]
    left: list[weakref.ref[ModuleType]] = []
    for name in reversed(names):
        module = sys.modules.pop(name)
        if isinstance(module, ModuleType):
            left.append(weakref.ref(module))
        del module
    gc.collect()
    for reference in left:
        alive = reference()
        if alive is not None:
            _clear(vars(alive))
            del alive
    gc.collect()


def _clear(names: dict[str, Any]) -> None:
    """Clear a module as the interpreter does if somebody still holds it: private names go first, builtins stay."""
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name.startswith("_") and not name.startswith("__")) == private:
                names[name] = None
