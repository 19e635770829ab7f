"""Leave the groups of this process, in which lost ranks do not answer any more, and form others in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx._comm.backend import rendezvous
from phalanx._comm.backend.torch_integration.groups import count_groups_anew, list_groups, phalanx_group
from phalanx._comm.rendezvous.bootstrap import checked_while_meeting
from phalanx.elastic.except_hook import one_except_hook

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


def leave_all_groups() -> None:
    """Leave all groups without waiting for any rank: lost ranks do not answer, and the others notice it."""
    for group in list_groups():
        if (ours := phalanx_group(group)) is not None:
            ours.abort()
    if dist.is_initialized():
        dist.destroy_process_group()
    # A group that never came about has been counted, and ranks that did not try would name the next one differently.
    count_groups_anew()
