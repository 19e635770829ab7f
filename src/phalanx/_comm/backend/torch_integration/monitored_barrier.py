"""Make `torch.distributed.monitored_barrier`, which accepts only Gloo groups, accept our groups."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx._comm.backend.torch_integration.patch import distributed_c10d, patch


@patch(
    "torch.distributed.distributed_c10d.monitored_barrier(group, timeout, wait_all_ranks)",
    loses="torch.distributed.monitored_barrier refuses Phalanx groups; call group.monitored_barrier() instead",
)
def extend_monitored_barrier() -> None:
    """Make torch's function, which compares a backend's name, accept our groups; needed until torch calls the group.

    The function is changed in place: a program may have imported it before it uses our backend.
    """
    function = inspect.unwrap(distributed_c10d().monitored_barrier)
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    _originals["monitored_barrier"] = original

    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):  # type: ignore[no-untyped-def]
        from phalanx._comm.backend.torch_integration.monitored_barrier import monitored_barrier as ours

        return ours(group, timeout, wait_all_ranks)

    function.__code__ = monitored_barrier.__code__


_originals: dict[str, Callable[..., Any]] = {}


def monitored_barrier(group: Any, timeout: timedelta | float | None, wait_all_ranks: bool) -> None:
    """Run `dist.monitored_barrier`: ours for our groups, torch's for other groups.

    Raises:
        DeadlineError: some ranks did not join within `timeout` (default: the group's); `missing` lists them.
    """
    ours = phalanx_group(distributed_c10d().group.WORLD if group is None else group)
    if ours is None:
        _originals["monitored_barrier"](group, timeout, wait_all_ranks)
        return
    if isinstance(timeout, (int, float)):  # torch's function accepts numbers, too
        timeout = timedelta(seconds=timeout)
    ours.monitored_barrier(timeout, wait_all_ranks)
