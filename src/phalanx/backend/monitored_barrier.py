"""`monitored_barrier`: torch's own function refuses every backend but Gloo, and people search logs for Gloo's words."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.backend.process_group import PhalanxProcessGroup
from phalanx.errors import DeadlineError


def monitored_barrier(
    original: Callable[..., None], group: Any, timeout: timedelta | float | None, wait_all_ranks: bool
) -> None:
    """What `dist.monitored_barrier` does: ours for our groups, torch's for all others.

    Raises:
        DeadlineError: some rank did not come within `timeout` (by default the group's); `missing` says which.
    """
    ours = dist.group.WORLD if group is None else group
    if not isinstance(ours, PhalanxProcessGroup):
        return original(group, timeout, wait_all_ranks)
    if isinstance(timeout, (int, float)):  # as torch's own takes it
        timeout = timedelta(seconds=timeout)
    return ours.monitored_barrier(timeout, wait_all_ranks)


def in_torchs_words(error: DeadlineError, rank: int, *, wait_all_ranks: bool) -> DeadlineError:
    """`error` of a barrier, below the sentence with which Gloo's monitored barrier begins."""
    missing = error.missing if wait_all_ranks else error.missing[:1]
    who = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    failed = f"; {who} failed to pass monitoredBarrier" if missing else ""
    return DeadlineError(f"Rank {rank} timed out in monitoredBarrier{failed}.\n{error}", missing=error.missing)
