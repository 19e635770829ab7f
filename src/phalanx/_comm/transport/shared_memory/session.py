"""A session is one rank's side of a host's memory: its lock for collectives, call sites, warnings, and its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from phalanx._base.core_numbers import PEER_LOST
from phalanx._base.deadline import timeout_ns
from phalanx._base.log import get_logger
from phalanx._comm.diagnostics import failures
from phalanx._comm.diagnostics.call_sites import short
from phalanx._comm.diagnostics.failure_report import LEFT_IN_FLIGHT, closed, describe_wait, occupied
from phalanx._comm.diagnostics.flight_recorder import read
from phalanx._comm.diagnostics.whereabouts import find_position, late_ranks, remember, tell_end
from phalanx._comm.rendezvous.bootstrap import NOTICE_S
from phalanx._comm.symmetric_memory.memory import Buffer, SymmetricMemory
from phalanx._comm.transport.base import CallContext
from phalanx.errors import ClosedError

_logger = get_logger(__name__)
_MAX_SITES = 256


class SharedMemorySession:
    """It has what surrounds the operations of a rank whose group's ranks are all on this host."""

    rank: int
    world_size: int

    def __init__(self, group: str) -> None:
        self.group = group
        self.lock = threading.Lock()  # held while the core runs a collective
        self.symm_mem: SymmetricMemory = None  # type: ignore[assignment]  # set by `attach`: it needs our `idle`
        self._sites: dict[tuple[str, int], int] = {}
        self._places: dict[int, str] = {}
        self._areas: dict[int, list[Buffer]] = {}  # the areas for `broadcast_buffers`, by their size
        self._said_at = 0
        self._say_again_s = 0.0

    def attach(self, symm_mem: SymmetricMemory) -> None:
        """Take the memory; this is called before the first operation."""
        self.symm_mem = symm_mem
        self.rank, self.world_size = symm_mem.rank, symm_mem.world_size
        self.core = symm_mem.core
        remember(self)

    @property
    def closed(self) -> bool:
        return self.symm_mem.closed

    @property
    def seq(self) -> int:
        """Return how many collectives this rank has begun."""
        return self.core.seq

    # -- the end -------------------------------------------------------------------------------------------------

    def set_exit_reason(self, exit_reason: str) -> None:
        """Set how this process ends, in the words that the other ranks' errors will have."""
        self.core.set_exit_reason(exit_reason)

    def leave_in_flight(self) -> None:
        """End the group while operations of this process still run, so that they wake up before its memory goes."""
        self.core.set_exit_reason(LEFT_IN_FLIGHT)
        self.core.set_poison(PEER_LOST, self.symm_mem.rank)

    def settle(self, patience_s: float) -> bool:
        """Return whether no thread of this process is in an operation, after at most `patience_s`.

        In a signal handler the operation that it interrupted is not waited for.
        """
        return self.core.settle(timeout_ns(patience_s))

    def close(self) -> None:
        """Leave the group. Ranks that wait for this one hear it at once, and so do threads in operations here."""
        if not self.symm_mem.closed:
            tell_end(self)
        self.symm_mem.close()

    def abandon(self) -> None:
        """Do what `close` does, at the end of the process, while threads are in operations: nothing happens to them."""
        if not self.symm_mem.closed:
            tell_end(self)
        self.symm_mem.close_for_good()

    # -- around an operation -------------------------------------------------------------------------------------

    def call_site(self, place: tuple[str, int]) -> int:
        """Return the number of a (file, line) in the table that other ranks and the agent can read."""
        number = self._sites.get(place)
        if number is None:
            if len(self._sites) >= _MAX_SITES:
                self._sites.clear()
                self._places.clear()
            text = f"{short(place[0])}:{place[1]}" if place[0] else ""
            try:
                number = self.core.add_call_site(text)
            except ClosedError:
                raise closed(self.group) from None
            self._sites[place] = number
            self._places[number] = text
        return number

    def place(self, number: int) -> str:
        """Return the 'file:line' that `call_site` gave this number, or an empty string."""
        return self._places.get(number, "")

    def idle(self, waited_s: float) -> None:
        """Say which ranks are missing, and after as long again which still are; the core calls this while it waits."""
        if waited_s < NOTICE_S or self.symm_mem is None or self.symm_mem.closed:
            return
        with contextlib.suppress(ClosedError):  # meanwhile, by another thread: whoever waits is about to hear it
            self._warn_of_wait(waited_s)

    def _warn_of_wait(self, waited_s: float) -> None:
        records = read(self.core, self.symm_mem.rank)
        if not records or (records[-1].enter_ns == self._said_at and waited_s < self._say_again_s):
            return
        last = records[-1]
        self._said_at, self._say_again_s = last.enter_ns, 2 * waited_s
        missing = late_ranks(self.core, self.symm_mem.rank, self.symm_mem.world_size) if last.is_collective else []
        if last.is_collective and not missing and self.core.failed_rank not in (-1, self.symm_mem.rank):
            missing = [
                self.core.failed_rank
            ]  # in a round of gradients no rank has come further: the core looks at flags
        if not last.is_collective and last.peer >= 0:
            missing = [last.peer]
        where = "; ".join(f"rank {r} {find_position(self.symm_mem, r)}" for r in missing[:8])
        where = where or ("other ranks" if last.is_collective else "a message")
        _logger.warning("%s", describe_wait(last.label, self.group, self.symm_mem.rank, missing, waited_s, where))

    def check(self, status: int, ctx: CallContext, *, kind: int = 0, peer: int = -1) -> None:
        """Raise the error that `status` stands for, if any. `kind` and `peer` describe a message, if it was one."""
        if status:
            try:
                error = failures.failure(status, self.symm_mem, self.group, ctx.timeout_s, kind=kind, peer=peer)
            except ClosedError:  # before the memory could be read, by another thread
                error = closed(self.group)
            raise error

    def _collective(self, ctx: CallContext, call: Callable[[], int]) -> None:
        with self.exclusive(ctx.timeout_s):
            try:
                status = call()
            except BaseException as error:
                self._interrupted(error)
                raise
        self.check(status, ctx)

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """Hold `lock` for one collective.

        Raises:
            DeadlineError: the other thread's collective was not over in time.
        """
        if self.lock.locked():
            self._await_lock(timeout_s)
        with self.lock:
            yield

    def _await_lock(self, timeout_s: float) -> None:
        if not self.lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise occupied(self.group, self.symm_mem.rank, timeout_s)
        self.lock.release()

    def _interrupted(self, error: BaseException) -> None:
        """Tell the peers that Ctrl-C, or a signal handler that raised, ended the wait."""
        with contextlib.suppress(ClosedError):
            self.core.set_exit_reason(type(error).__name__)
