"""Functions that the tests call on other workers, and workers to call them on."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from phalanx import rpc
from phalanx.errors import PeerLostError
from phalanx.testing import run_ranks


def join(rank: int, world_size: int | None, folder: str, **options: Any) -> None:
    """Make this process the worker `w<rank>`."""
    made = rpc.RpcBackendOptions(init_method=f"file://{folder}/store", **options)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=made)


@contextlib.contextmanager
def worker(rank: int, world_size: int | None, folder: str, **options: Any) -> Iterator[None]:
    """This process as the worker `w<rank>`, until all have come to the end."""
    join(rank, world_size, folder, **options)
    try:
        yield
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()


def run_workers(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """`fn(rank, folder, *args)` in each process; it makes the worker itself."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(_start, world_size, fn, folder, *args, init=False, **kwargs)


def run_caller(
    fn: Callable[..., Any], world_size: int, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """`fn(*args)` at the first of so many workers; the others only serve."""
    return run_workers(_call_or_serve, world_size, world_size, fn, options or {}, *args, **kwargs)[0]


def _call_or_serve(
    rank: int, folder: str, world_size: int, fn: Callable[..., Any], options: dict[str, Any], *args: Any
) -> Any:
    with worker(rank, world_size, folder, **options):
        return fn(*args) if rank == 0 else None


def _start(rank: int, world_size: int, fn: Callable[..., Any], folder: str, *args: Any) -> Any:
    # The handler of pytest's plugin for time limits may raise: with it the main thread would not read for itself.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return fn(rank, folder, *args)


class Counter:
    """An object to refer to."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int, *, twice: bool = False) -> int:
        self.value += amount * (2 if twice else 1)
        return self.value

    @rpc.functions.async_execution
    def add_later(self, amount: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        threading.Thread(target=lambda: future.set_result(self.add(amount)), name="phalanx-test-later").start()
        return future


def nothing() -> None:
    pass


def pid() -> int:
    return os.getpid()


def same(*args: Any, **kwargs: Any) -> Any:
    return (args, kwargs) if kwargs or len(args) != 1 else args[0]


def fail(error: BaseException) -> None:
    raise error


def until(holds: Callable[[], object]) -> None:
    """Wait for it; a worker may not be there yet, or not any more."""
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(PeerLostError, ValueError):
            if holds():
                return
        assert time.monotonic() < end, "it did not come to hold within 60 s"
        time.sleep(0.001)


def check_same(found: Any, expected: Any, *where: Any) -> None:
    """Compare what two programs have seen: tensors within rounding, all else exactly, with its type."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        torch.testing.assert_close(found, expected, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, list | tuple):
        assert (type(found), len(found)) == (type(expected), len(expected)), (where, found, expected)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_same(one, other, *where, number)
    else:
        assert (type(found), found) == (type(expected), expected), (where, found, expected)


events: dict[str, threading.Event] = {}


def event(name: str) -> threading.Event:
    return events.setdefault(name, threading.Event())


def wait_event(name: str) -> str:
    if not event(name).wait(60):
        raise AssertionError(f"nobody set {name}")
    return name


def set_event(name: str) -> None:
    event(name).set()


def dismiss(worker: str, name: str) -> None:
    """Set the event `name` there, upon which the worker ends, perhaps before its answer has left."""
    with contextlib.suppress(PeerLostError):
        rpc.rpc_sync(worker, set_event, (name,))
