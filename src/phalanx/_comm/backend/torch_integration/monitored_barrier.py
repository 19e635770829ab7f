"""Make `torch.distributed.monitored_barrier`, which refuses every group but Gloo's, take our groups."""

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
    loses="torch.distributed.monitored_barrier refuses our groups; call the group's own, group.monitored_barrier()",
)
def extend_monitored_barrier() -> None:
    """Let torch's function, which refuses all groups but Gloo's by name, take ours; ends when it asks the group.

    It is changed in place: a program may have imported it long before it asks for us.
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
    """Carry out `dist.monitored_barrier`: our own for our groups, torch's for all others.

    Raises:
        DeadlineError: some rank did not come within `timeout` (by default the group's); `missing` says which.
    """
    ours = phalanx_group(distributed_c10d().group.WORLD if group is None else group)
    if ours is None:
        _originals["monitored_barrier"](group, timeout, wait_all_ranks)
        return
    if isinstance(timeout, (int, float)):  # torch's own takes it so, too
        timeout = timedelta(seconds=timeout)
    ours.monitored_barrier(timeout, wait_all_ranks)
