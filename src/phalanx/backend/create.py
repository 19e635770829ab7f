"""From torch's request for a group to a group: meet, share memory, and step aside where memory can't be shared."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from phalanx.arena.handover import Counter, new_token
from phalanx.arena.watch import ProcessId
from phalanx.backend.meeting import Seat, host_identity, meet, ranks
from phalanx.deadline import Deadline
from phalanx.errors import DeadlineError
from phalanx.log import get_logger, warn_once

try:
    from phalanx import _core
except ImportError:  # no compiler at installation, or no futex on this platform
    _core = None  # type: ignore[assignment]

_logger = get_logger(__name__)


def create_process_group(options: Any, backend_options: Any = None) -> Any:
    """The process group that `init_process_group("phalanx")` and `new_group` ask for.

    Collective over the group's ranks. With all ranks on one host it is a `PhalanxProcessGroup`. Where memory can't be
    shared (ranks on several hosts, no C core) it is torch's Gloo group, and the log says so once.

    Raises:
        ValueError: the timeout leaves no time at all.
        DeadlineError: some rank never came; the message names it, on every rank that did.
    """
    timeout: timedelta = options.timeout
    if timeout <= timedelta(0):
        raise ValueError(f"init_process_group: timeout must be above zero, got {timeout.total_seconds():g} s")
    deadline = Deadline.after(timeout)
    store, rank, size = options.store, options.group_rank, options.group_size
    name = options.group_id
    with contextlib.ExitStack() as stack:
        counter = stack.enter_context(_counter()) if _core is not None else None
        seats = meet(store, rank, size, _my_seat(counter), name, deadline)
        reason = _cannot_share(seats)
        if reason:
            warn_once(_logger, f"backend 'phalanx': {reason}; using Gloo for group {name!r}")
            return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        assert counter is not None
        group = _share(counter, seats, options, deadline)
    _forget_meeting(store, rank, size)
    _leave_at_exit()
    return group


def _counter() -> Counter:
    return Counter(new_token())


def _my_seat(counter: Counter | None) -> Seat:
    return Seat(
        host=host_identity(),
        hostname=os.uname().nodename,
        token=counter.token if counter else "",
        process=ProcessId.of_self(),
        cpus=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
        core=_core.VERSION if _core is not None else 0,
    )


def _cannot_share(seats: Sequence[Seat]) -> str:
    """Why these ranks can't share memory, or nothing. The same answer on every rank."""
    without = [r for r, seat in enumerate(seats) if seat.core == 0]
    if without:
        return f"the C core is not there on {ranks(without)} (reinstall with a C compiler at hand)"
    if len({seat.core for seat in seats}) > 1:
        return "the ranks run different versions of Phalanx"
    if len({seat.host for seat in seats}) > 1:
        return f"the ranks are on {len({seat.host for seat in seats})} hosts, or in containers with separate networks"
    return ""


def _share(counter: Counter, seats: Sequence[Seat], options: Any, deadline: Deadline) -> Any:
    from phalanx.arena.arena import Member, open_as_leader, open_as_member
    from phalanx.backend.process_group import PhalanxProcessGroup
    from phalanx.backend.shared_memory import SharedMemory, Span

    rank, name = options.group_rank, options.group_id
    members = [Member(seat.process, seat.cpus) for seat in seats]
    memory = SharedMemory(name)
    try:
        if rank == 0:
            arena = open_as_leader(counter, members, deadline, lambda missing: None, memory.idle)
        else:
            arena = open_as_member(seats[0].token, rank, members, deadline, memory.idle)
    except DeadlineError as error:
        raise DeadlineError(
            f"init_process_group of group {name!r} on rank {rank}: {error}.\nRead the log of the missing rank first.",
            missing=error.missing,
        ) from None
    memory.attach(arena)
    try:
        memory.barrier(Span(max(deadline.left_s, 0.001), memory.site(("", 0))))
    except BaseException:
        arena.close()
        raise
    return PhalanxProcessGroup(
        options.store, memory, rank, options.group_size, options.timeout, name, options.global_ranks_in_group
    )


def _forget_meeting(store: Any, rank: int, size: int) -> None:
    """All have met: the keys go, so that a later group of the same name can meet under them."""
    if rank == 0:
        for key in [f"rank/{r}" for r in range(size)] + ["seats"]:
            with contextlib.suppress(Exception):  # a store that cannot delete keeps a few bytes
                store.delete_key(key)


_exit_watched = False


def _leave_at_exit() -> None:
    """Once per process: whoever ends without `destroy_process_group` tells its peers how."""
    global _exit_watched
    if _exit_watched:
        return
    _exit_watched = True
    from phalanx.backend.process_group.identity import leave_all

    note = ["it ended without destroy_process_group"]
    previous = sys.excepthook

    def remember(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        note[0] = f"it ended with {kind.__name__}: {error}"
        previous(kind, error, tb)

    hook: Callable[[type[BaseException], BaseException, TracebackType | None], Any] = remember
    sys.excepthook = hook
    atexit.register(lambda: leave_all(note[0]))
