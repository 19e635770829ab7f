"""Write standard output that may be ASCII, closed or full: report that in one line and end without traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class OutputLostError(Exception):
    """The output of a command cannot be written."""


class _Descriptor(io.FileIO):
    """A `_Descriptor` is standard output; its write errors are distinguished from every other OSError."""

    lost = False

    def write(self, data: Any, /) -> int:
        if self.lost:  # the interpreter tries again at its end
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self.lost = True
            raise OutputLostError from error


def open_standard_descriptors() -> None:
    """Fill the descriptors that the caller has closed (`>&-`): else our own pipes get their numbers, and the output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def guarded(act: Callable[[], T]) -> T:
    """Return `act()`, which prints. Characters missing in the output's encoding become question marks.

    Raises:
        SystemExit: nothing more could be written: 1, having said why; 141 if the reader had seen enough (`| head`).
    """
    open_standard_descriptors()
    before = sys.stdout
    if before is not sys.__stdout__:  # a caller inside this process has put something else there, or we have
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
