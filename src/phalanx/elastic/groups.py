"""Leave the groups of this process, in which lost ranks do not answer any more, and form others in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.backend import rendezvous
from phalanx.backend.torch_integration.groups import count_groups_anew, list_groups, phalanx_group
from phalanx.coordination.bootstrap import checked_while_meeting
from phalanx.deadline import Deadline
from phalanx.diagnostics.rank_list import name_ranks
from phalanx.elastic.except_hook import one_except_hook
from phalanx.errors import DeadlineError

_PAUSE_S = 0.005
_last_meeting = -1, 0  # the generation, and how many meetings it has had before


def meet(environment: Mapping[str, str]) -> rendezvous.StoreAddress:
    """Return where the ranks of a generation meet, as `rendezvous.enter_generation` does: each time another place.

    All of its ranks come to each of its meetings.
    """
    global _last_meeting
    store, rank, world_size = rendezvous.enter_generation(environment)
    rendezvous.end_rehearsal()
    generation, number = _last_meeting
    _last_meeting = rendezvous.generation(), number + 1 if generation == rendezvous.generation() else 0
    return dist.PrefixStore(f"meeting-{_last_meeting[1]}", store), rank, world_size


def form_world(store: Any, rank: int, world_size: int, timeout: timedelta, check: Callable[[], None]) -> Any:
    """Form the default group of the ranks that meet at `store`, and return it. All of them call it.

    `check` is called again and again while ranks are awaited; what it raises ends the wait.
    """
    with checked_while_meeting(check), one_except_hook():
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return dist.group.WORLD


def form_world_alone(rank: int, world_size: int, timeout: timedelta) -> Any:
    """Leave all groups, and return the default group of a process that meets the others later, in a rehearsal."""
    leave_all_groups()
    rendezvous.end_rehearsal(is_over=False)
    return form_world(dist.HashStore(), rank, world_size, timeout, lambda: None)


def leave_all_groups() -> None:
    """Leave all groups without waiting for any rank: lost ranks do not answer, and the others notice it."""
    for group in list_groups():
        if (ours := phalanx_group(group)) is not None:
            ours.abort()
    if dist.is_initialized():
        dist.destroy_process_group()
    # A group that never came about has been counted, and ranks that did not try would name the next one differently.
    count_groups_anew()


def wait_for_all(store: Any, group: Any, deadline: Deadline, check: Callable[[], None]) -> None:
    """Wait until all ranks of `group` have come here, without an operation of the group, which they leave next.

    `check` is called again and again; what it raises ends the wait.

    Raises:
        DeadlineError: some ranks have not come.
    """
    keys = [f"leaves/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], "1")
    if not deadline.wait_until(lambda: store.check(keys), _PAUSE_S, look_around=check):
        missing = tuple(rank for rank, key in enumerate(keys) if not store.check([key]))
        raise DeadlineError(
            f"phalanx.elastic: {name_ranks(missing)} did not leave the group within {deadline.timeout_s:g} s, in "
            "which a replacement gets what an earlier run has left.",
            missing=missing,
        )
