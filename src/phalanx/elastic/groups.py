"""Leave this process's groups after a loss, without waiting for the lost ranks, and form the default group again."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from phalanx._comm.backend import rendezvous
from phalanx._comm.backend.torch_integration.groups import list_groups, phalanx_group, reset_group_count
from phalanx._comm.rendezvous.bootstrap import checked_while_forming

_last_rendezvous = -1, 0  # the generation, and the index of its latest rendezvous


def next_rendezvous(environment: Mapping[str, str]) -> rendezvous.StoreAndRank:
    """Return the store, this rank and the world size for the next rendezvous of the generation in `environment`.

    All ranks of the generation must call this the same number of times.
    """
    global _last_rendezvous
    store, rank, world_size = rendezvous.enter_generation(environment)
    rendezvous.end_rehearsal()
    generation, number = _last_rendezvous
    _last_rendezvous = rendezvous.generation(), number + 1 if generation == rendezvous.generation() else 0
    return dist.PrefixStore(f"meeting-{_last_rendezvous[1]}", store), rank, world_size


def form_world(store: Any, rank: int, world_size: int, timeout: timedelta, check: Callable[[], None]) -> Any:
    """Form and return the default group of the ranks at `store`. All of these ranks call this.

    `check` is called repeatedly while ranks are missing; its exception ends the wait.
    """
    with checked_while_forming(check), one_except_hook():
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return dist.group.WORLD


def leave_all_groups() -> None:
    """Leave all groups without waiting: lost ranks do not answer, and the others detect that this rank has left."""
    for group in list_groups():
        if (ours := phalanx_group(group)) is not None:
            ours.abort()
    if dist.is_initialized():
        dist.destroy_process_group()
    # torch names a group by the number of groups that the process has tried to form, which may differ between ranks.
    reset_group_count()


# Keep torch's excepthook, which prints uncaught exceptions, from piling up when groups are formed again.
#
# `init_process_group` wraps the current hook in torch's hook, which prefixes each line with the rank. Each new group
# would wrap it once more, until a thousand nested hooks overflow Python's stack and nothing is printed.

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_TORCH_HOOK = "init_process_group.<locals>._distributed_excepthook"


@contextmanager
def one_except_hook() -> Iterator[None]:
    """Keep the script's hook wrapped in torch's hook only once, while this context forms another default group."""
    hook = sys.excepthook
    inner = _find_inner(hook)
    sys.excepthook = hook if inner is None else inner
    try:
        yield
    except BaseException:
        sys.excepthook = hook
        raise
    if inner is None:  # the script has wrapped torch's hook in its own
        sys.excepthook = hook


def _find_inner(hook: Hook) -> Hook | None:
    """Return the hook that torch's hook wraps; None if `hook` is not torch's."""
    if getattr(hook, "__qualname__", "") != _TORCH_HOOK:
        return None
    inner: Hook | None = inspect.getclosurevars(hook).nonlocals.get("old_hook")
    return inner
