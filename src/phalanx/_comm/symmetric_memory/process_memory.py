"""Read the memory of another process of this host, without its help, by `process_vm_readv` (CMA in MPI libraries).

Data are copied once, directly to the destination. The kernel requires the right to trace the other process: the same
user and, under Yama's `ptrace_scope=1`, the consent of that process, which `readable` gives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_PR_SET_PTRACER = 0x59616D61
_ANYBODY = ctypes.c_ulong(-1)
_PIECE_BYTES = 32 << 20  # copied by one system call, which cannot be interrupted
_MOST_THREADS = 4


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True)
class Copy:
    """A `Copy` is a copy of `nbytes` from address `source` of the other process to address `place` of this one."""

    place: int
    source: int
    nbytes: int


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Allow processes of the same user to read this process's memory in the block. Without Yama they always can."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)


def read_process(pid: int, copies: Sequence[Copy]) -> None:
    """Run `copies` from the memory of process `pid`. Neither process may change the memory meanwhile.

    Cost: one copy, by up to four threads.

    Raises:
        OSError: the process has ended, may not be read (EPERM), or this system has no such call (ENOSYS).
    """
    pieces = [
        Copy(copy.place + at, copy.source + at, min(_PIECE_BYTES, copy.nbytes - at))
        for copy in copies
        for at in range(0, copy.nbytes, _PIECE_BYTES)
    ]
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(pieces)) if hasattr(os, "sched_getaffinity") else 1
    if threads < 2:
        for piece in pieces:
            _read(pid, piece)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="phalanx-read") as pool:
        for _ in pool.map(lambda piece: _read(pid, piece), pieces):
            pass


def _read(pid: int, piece: Copy) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        call = libc.process_vm_readv
    except AttributeError:  # not Linux
        raise OSError(38, "this system has no process_vm_readv") from None
    call.restype = ctypes.c_ssize_t
    done = 0
    while done < piece.nbytes:
        left = piece.nbytes - done
        mine, theirs = _Span(piece.place + done, left), _Span(piece.source + done, left)
        got = call(
            pid, ctypes.byref(mine), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0)
        )
        if got <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process {pid} cannot be read: {os.strerror(number)}")
        done += got
