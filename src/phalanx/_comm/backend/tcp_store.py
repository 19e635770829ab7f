"""Open the job's `TCPStore` at an address: rank 0 serves it, the others connect, and no rank waits for late ranks.

Problems are reported at once: a port that another process uses, or a server that is not a store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore

from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger
from phalanx._base.threads import call_in_thread
from phalanx._comm.rendezvous.bootstrap import NOTICE_S, report_duplicate_rank

_logger = get_logger(__name__)
_ANSWER_S = 8.0  # a store answers within milliseconds; torch's client retries until its time is up
_GRACE_S = 4.0  # after this, torch hangs: it waits forever for a server that accepts connections and sends nothing
_LONGEST_PAUSE_S = 0.25


@dataclass(frozen=True)
class StoreAddress:
    """A `StoreAddress` is the address of the job's store, and the rank that opens it; an unknown number is -1."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout: timedelta
    function: str = "init_process_group"

    @property
    def caller(self) -> str:
        """Return the function and rank that open the store, for messages."""
        return self.function + (f" on rank {self.rank} of {self.world_size}" if self.rank >= 0 else "")


def open_store(place: StoreAddress, *, serve: bool, libuv: bool = True) -> Any:
    """Return the store at `place`; with `serve`, this process serves the store.

    Raises:
        DistNetworkError: another process uses the port, or rank 0 cannot be reached; the message says which.
    """
    if serve:
        return _serve(place, libuv)
    deadline = Deadline.after(place.timeout)
    error = ""
    while not (seen := _wait_for_listener(place, deadline)):
        store, error = _connect(place, libuv, min(_ANSWER_S, max(deadline.left_s, 0.1)))
        if store is not None:
            store.set_timeout(place.timeout)
            return store
        if deadline.passed or not probe(place.host, place.port):  # something answers, but it is not a store
            break
    raise DistNetworkError(explain(place, seen, error))


def _wait_for_listener(place: StoreAddress, deadline: Deadline) -> str:
    """Return "" once a process listens at `place`, or after the deadline why the last connection failed.

    Log one notice after five seconds. torch's own client would print its C++ stack at each failed attempt.
    """
    notice_at = Deadline.after(NOTICE_S)
    has_notified, pause_s = False, 0.01
    while (seen := probe(place.host, place.port)) and not deadline.passed:
        if notice_at.passed and not has_notified:
            has_notified = True
            _logger.warning(
                f"{place.caller}: waiting for rank 0 at {place.host} port {place.port} for {NOTICE_S:.0f} s ({seen}); "
                f"giving up after {deadline.timeout_s:.0f} s."
            )
        time.sleep(min(pause_s, deadline.left_s))
        pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
    return seen


def _connect(place: StoreAddress, libuv: bool, timeout_s: float) -> tuple[Any, str]:
    """Return the store and "", or None and torch's error. torch connects in a thread, because it may never return."""

    def connect() -> TCPStore:
        limit = timedelta(seconds=timeout_s)
        return TCPStore(
            place.host, place.port, None, False, limit, wait_for_workers=False, multi_tenant=True, use_libuv=libuv
        )

    connected = call_in_thread(connect, "phalanx-connect")
    if not wait([connected], timeout_s + _GRACE_S).done:
        return None, ""
    try:
        return connected.result(), ""
    except RuntimeError as error:
        return None, str(error)


def _serve(place: StoreAddress, libuv: bool) -> Any:
    try:
        store = TCPStore(
            place.host,
            place.port,
            place.world_size,
            True,
            place.timeout,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=libuv,
        )
    except DistNetworkError as error:
        if not _is_in_use(place.port):
            raise DistNetworkError(explain(place, probe(place.host, place.port), str(error))) from error
        raise DistNetworkError(_explain_port_in_use(place, _contest(place, libuv), str(error))) from error
    note_served(store)
    return store


_served: set[tuple[int, int]] = set()


def note_served(store: Any) -> None:
    """Record that this process serves the store, so that the store ends with the process."""
    _served.add((os.getpid(), store.port))


def is_served_here(store: Any) -> bool:
    """Return whether this process, and not the parent from which it was forked, serves the store."""
    return (os.getpid(), getattr(store, "port", -1)) in _served


def _is_in_use(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE  # and not, say, a port below 1024
    return False


def _contest(place: StoreAddress, libuv: bool) -> str:
    """Report a second rank 0 to the ranks that wait at the store; return the error that they all raise, or ""."""
    store, _ = _connect(place, libuv, 2.0)
    if store is None:
        return ""
    with contextlib.suppress(RuntimeError):
        for prefix in ("default_pg", "0/", "cpu/"):  # torch's prefixes of the keys of a job's first group
            store = PrefixStore(prefix, store)
        return report_duplicate_rank(store, place.rank, place.world_size)
    return ""


# Explain why the job's store cannot be reached: the rank, the address, the answer from there, and advice.
#
# The errors have torch's classes, and quote its text after the explanation.

_PROBE_S = 2.0
_REFUSED = "the host refuses connections to that port: no process listens there"


@contextlib.contextmanager
def explain_store_errors(address: StoreAddress) -> Iterator[None]:
    """Add the rank, the address and advice to the errors that torch raises about the store in the block.

    Raises:
        DistNetworkError, DistStoreError: as torch does, with an explanation.
    """
    try:
        yield
    except (DistNetworkError, DistStoreError) as error:
        seen = "" if address.rank == 0 else probe(address.host, address.port)
        raise type(error)(explain(address, seen, str(error))) from error


def probe(host: str, port: int) -> str:
    """Try one TCP connection to that address; return why it failed, or ""."""
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S) as connection:
            if connection.getsockname() != connection.getpeername():
                return ""
            return _REFUSED  # no process listens: TCP has connected an ephemeral port of this host to itself
    except ConnectionRefusedError:
        return _REFUSED
    except socket.gaierror as error:
        return f"the name does not resolve on this host ({error.strerror})"
    except TimeoutError:
        return "nothing answers at that address"
    except OSError as error:
        return f"it cannot be reached ({error.strerror or error})"


def explain(address: StoreAddress, seen: str, torch_error: str) -> str:
    """Return the message for a store that cannot be opened; `seen` is from `probe`, `torch_error` from torch."""
    place = f"{address.host} port {address.port}"
    span = f"within {address.timeout.total_seconds():.1f} s"
    if address.rank == 0:
        return (
            f"{address.caller}: the job's store cannot be opened at {place}"
            f"{f': {seen}' if seen else ''}.\n"
            f"{_quote(torch_error)}"
            "Check that MASTER_ADDR names this host, on which rank 0 runs, and that this user may open MASTER_PORT."
        )
    fact = seen or "the program that answers there is not a store"
    return (
        f"{address.caller}: rank 0 did not answer at {place} {span}: {fact}.\n"
        f"{_quote(torch_error)}"
        "Check that rank 0 was started and still runs (read its log first), that MASTER_ADDR names its host as seen "
        "from here, that MASTER_PORT is the same on every rank, and that no firewall blocks it."
    )


def _quote(torch_error: str) -> str:
    return f"torch said: {torch_error.splitlines()[0]}\n" if torch_error else ""


def _explain_port_in_use(address: StoreAddress, contested: str, torch_error: str) -> str:
    """Return the message for a rank 0 whose port is in use; `contested` is the error of the ranks that wait there."""
    fact = f"\n{contested}" if contested else " That process is another program, or a job that is still running."
    return (
        f"{address.caller}: port {address.port} is in use by another process of this host, "
        f"so rank 0 cannot serve the job's store there.{fact}\n"
        f"{_quote(torch_error)}"
        "Choose another MASTER_PORT (the same on every rank), or end that process: `ss -ltnp` shows it."
    )
