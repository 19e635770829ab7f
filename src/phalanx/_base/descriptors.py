"""Ask how many file descriptors this process may have open, and wait until one of some can be read."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import sys
from collections.abc import Iterable
from typing import Protocol, TypeVar


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


T = TypeVar("T", bound="int | _HasDescriptor")


def raise_limit(wanted: int) -> int:
    """Let this process have `wanted` open files, or as many of them as the hard limit allows; return how many it may.

    Processes that run already keep their limit. A sandbox may refuse to raise it; then it stays as it is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def describe_limit() -> str:
    """Return how many open files this process may have, and what to do where these are too few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"This process may have {soft} open files: raise the limit (ulimit -n)."


def find_shortage(needed: int) -> str:
    """Raise the limit so that `needed` more files can be opened; where that can't be, return the words for the user."""
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # there is no /proc
        num_open = 0
    allowed = raise_limit(num_open + needed)
    if num_open + needed <= allowed:
        return ""
    return (
        f"{needed} more open files are needed, {num_open} are open, and this process may have {allowed} "
        "(RLIMIT_NOFILE). Raise the hard limit before the job starts: `ulimit -Hn`, LimitNOFILE= of a service, "
        "--ulimit nofile= of a container."
    )


def wait_readable(sources: Iterable[T], timeout_s: float | None = None) -> list[T]:
    """Wait until some of `sources` can be read or have ended, and return those; none where time is up first.

    Unlike `select.select` this takes descriptors from 1024 on, which a process of a large job has.
    """
    poll = select.poll()
    by_fd = {source if isinstance(source, int) else source.fileno(): source for source in sources}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
