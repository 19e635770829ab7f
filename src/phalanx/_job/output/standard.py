"""Write to stdout and stderr, which may be ASCII-only, closed or full; report errors in a line without traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def encode(text: str) -> bytes:
    """Return `text` as UTF-8; surrogates, which stand for undecodable bytes, are escaped, as in `\\udc80`."""
    return text.encode(errors="backslashreplace")


def show(fd: int, text: str) -> bool:
    """Write all of `text` and a line end to `fd`; return False if this fails (closed, full)."""
    data = encode(text) + b"\n"
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True


class OutputLostError(Exception):
    """Standard output cannot be written."""


class _Descriptor(io.FileIO):
    """A `_Descriptor` is standard output, whose write errors raise `OutputLostError` instead of OSError."""

    lost = False

    def write(self, data: Any, /) -> int:
        if self.lost:  # the interpreter tries again at exit
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self.lost = True
            raise OutputLostError from error


def open_standard_descriptors() -> None:
    """Open closed standard descriptors (`>&-`) as /dev/null: otherwise one of our pipes would receive the output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `fd`


def guarded(act: Callable[[], T]) -> T:
    """Call `act`, which prints, and return its result. Characters that cannot be encoded become question marks.

    Raises:
        SystemExit: stdout cannot be written. The code is 1, after printing why, or 141 if the reader has closed it
            (`| head`).
    """
    open_standard_descriptors()
    before = sys.stdout
    if before is not sys.__stdout__:  # a caller in this process has replaced it, or this function has
        return act()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(1, "w", closefd=False)),
        encoding=getattr(before, "encoding", "utf-8"),
        errors="replace",
        line_buffering=os.isatty(1) or bool(os.environ.get("PYTHONUNBUFFERED")),
    )
    try:
        try:
            return act()
        finally:
            sys.stdout.flush()
    except OutputLostError as lost:
        error = lost.__cause__
        if isinstance(error, BrokenPipeError):
            sys.exit(141)
        reason = error.strerror if isinstance(error, OSError) else "unknown"
        print(f"phalanx: cannot write to standard output: {reason}", file=sys.stderr)
        sys.exit(1)
