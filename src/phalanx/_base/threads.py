"""Start threads, run a function on a thread of its own, and wait for threads to end."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from phalanx._base.deadline import Deadline
from phalanx.errors import PhalanxError

T = TypeVar("T")


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread, and return it.

    Raises:
        PhalanxError: the system refuses another thread.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        most = "no limit on" if soft == resource.RLIM_INFINITY else f"at most {soft}"
        raise PhalanxError(
            f"{name}: {error}: the system refused. This user may have {most} processes and threads (ulimit -u); a "
            "container may have its own limit (pids.max), and each thread needs memory for its stack.\n"
            "Raise the limit, or start fewer ranks or threads (OMP_NUM_THREADS, DataLoader workers)."
        ) from None
    return thread


def call_in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Call `function` on a new daemon thread, so that the caller can limit its wait for the result.

    Return a future with the result or the exception; `concurrent.futures.wait` takes a timeout.

    Raises:
        PhalanxError: as `start_thread`.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # the waiting thread must receive any exception
            future.set_exception(error)

    start_thread(run, name)
    return future


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    """Wait up to `timeout_s` in total for `threads` to end, except the calling thread."""
    deadline = Deadline.after(timeout_s)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(deadline.left_s)
