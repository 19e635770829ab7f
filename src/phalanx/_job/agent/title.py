"""Set the command line that `ps` shows for a forked process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from phalanx._base.processes import read_stat

_PR_SET_MM = 35
_PR_SET_MM_ARG_END = 9


def set_command(words: Sequence[str]) -> None:
    """Set the command that `ps`, `top` and `pgrep -f` show to `words`, truncated to the length of the old command line.

    The caller must keep the first word, which the C library uses as the program's path. Do nothing if the system hides
    the address of the command line.
    """
    try:
        start, end = map(int, read_stat("self")[45:47])
    except ValueError:
        return
    room = end - start
    if start == 0 or room < 2:
        return
    data = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(data) > room:
        data = data[: room - 1] + b"\0"
    # Python has copied the old words. The last byte stays 0, because the kernel reads up to a 0.
    ctypes.memmove(start, data.ljust(room, b"\0"), room)
    # a privileged process can also shorten the command; otherwise zeros follow
    numbers = (_PR_SET_MM, _PR_SET_MM_ARG_END, start + len(data), 0, 0)
    ctypes.CDLL(None).prctl(*(ctypes.c_ulong(number) for number in numbers))


def count_room(words: Sequence[str]) -> int:
    """Return the number of bytes of `words` in the kernel's copy of the command line."""
    return sum(len(os.fsencode(word)) + 1 for word in words)
