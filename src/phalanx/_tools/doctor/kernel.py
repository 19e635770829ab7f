"""Try the features that shared memory needs: the C core, /proc, futex, memfd, pidfd, Unix sockets, namespaces.

Each may be missing on an old kernel, in a sandbox such as gVisor, or behind a seccomp filter; a version number does not
show that, so each is used once.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import platform
import socket
import sys
from collections.abc import Callable

from phalanx._comm.symmetric_memory.memfd import open_memfd
from phalanx._tools.doctor.facts import Kernel, Probe

_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}
_FUTEX_WAKE = 1
# The machine's own namespaces have the same numbers everywhere (include/linux/proc_ns.h), except the network's.
_FIRST_NAMESPACES = {"pid": "pid:[4026531836]", "user": "user:[4026531837]"}


def examine_kernel() -> Kernel:
    """Try each feature on this host."""
    core = _try(_use_core)
    if sys.platform != "linux":
        return Kernel(core=core)
    return Kernel(
        core=core,
        proc=_try(_use_proc),
        futex=_try(_use_futex),
        memfd=_try(_use_memfd),
        pidfd=_try(_use_pidfd),
        unix_sockets=_try(_use_unix_sockets),
        namespaces=tuple(kind for kind, first in _FIRST_NAMESPACES.items() if _namespace(kind) not in ("", first)),
    )


def _try(use: Callable[[], str]) -> Probe:
    try:
        return Probe(True, use())
    except Exception as error:
        return Probe(False, f"{type(error).__name__}: {error}")


def _use_core() -> str:
    core = importlib.import_module("phalanx._core")
    return f"in {os.path.basename(core.__file__ or 'the interpreter')}"


def _use_futex() -> str:
    number = _FUTEX_NUMBER.get(platform.machine())
    if number is None:
        return f"not tried: its number on {platform.machine()} is not known here"
    word = ctypes.c_uint32(0)
    if ctypes.CDLL(None, use_errno=True).syscall(number, ctypes.byref(word), _FUTEX_WAKE, 1, None, None, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "answers"


def _use_proc() -> str:
    return f"{len(os.listdir('/proc/self/fd'))} open files"


def _use_memfd() -> str:
    """Write in one mapping and read in another that was opened through /proc, as a peer would."""
    descriptor = open_memfd("phalanx-doctor")
    try:
        os.truncate(descriptor, mmap.PAGESIZE)
        peer = os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR)
        try:
            with mmap.mmap(descriptor, mmap.PAGESIZE) as ours, mmap.mmap(peer, mmap.PAGESIZE) as theirs:
                ours[:4] = b"here"
                if theirs[:4] != b"here":
                    raise OSError("two mappings of one memfd do not show the same bytes")
        finally:
            os.close(peer)
    finally:
        os.close(descriptor)
    return "shared by two mappings"


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _use_unix_sockets() -> str:
    """Listen at an abstract address, as the first rank of a host does, and connect to it."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as connection:
        listener.bind(f"\0phalanx-doctor-{os.getpid()}")
        listener.listen()
        connection.connect(listener.getsockname())
    return "connect"


def _use_pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "opens"
