"""Query and raise the limit on open files, and wait until a descriptor is readable."""

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
    """Raise this process's limit on open files to `wanted`, or to the hard limit; return the limit.

    Running child processes keep their limit. If a sandbox refuses, the limit does not change.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def describe_limit() -> str:
    """Return the limit on open files, with advice for raising it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"This process may have at most {soft} open files. Raise the limit (ulimit -n)."


def find_shortage(needed: int) -> str:
    """Raise the limit so that `needed` more files can be opened; if that fails, return a message for the user."""
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # no /proc
        num_open = 0
    allowed = raise_limit(num_open + needed)
    if num_open + needed <= allowed:
        return ""
    return (
        f"This process needs {needed} more open files; {num_open} are open, and its limit is {allowed} "
        "(RLIMIT_NOFILE). Raise the hard limit before the job starts: `ulimit -Hn`, LimitNOFILE= of a service, "
        "--ulimit nofile= of a container."
    )


def wait_readable(sources: Iterable[T], timeout_s: float | None = None) -> list[T]:
    """Wait until some of `sources` can be read or have ended, and return these; return [] after `timeout_s`.

    Unlike `select.select`, this accepts descriptors of 1024 and above, which processes of large jobs have.
    """
    poll = select.poll()
    by_fd = {source if isinstance(source, int) else source.fileno(): source for source in sources}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
