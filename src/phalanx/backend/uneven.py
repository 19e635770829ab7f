"""Who trains over a group, and which of its calls are part of a training step: see `transport/uneven`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from phalanx.backend.shared import shares_memory
from phalanx.core_numbers import STEP
from phalanx.transport.uneven import Participant, UnevenInputs


def take_part(group: Any, participant: Participant) -> bool:
    """Let steps over `group` do without ranks that wait elsewhere, where that is possible; whether it is.

    Collective, in the sense that all ranks do it for the same participants in the same order.
    """
    if not shares_memory(group) or group.size() == 1:
        return False
    if group._uneven_inputs is None:
        assert group._shared_memory is not None
        group._uneven_inputs = group._shared_memory.uneven = UnevenInputs(group)
        group.symm_mem.core.allow_uneven()
    group._uneven_inputs.add(participant)
    return True


@contextlib.contextmanager
def training_step(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Collectives of `group` inside are part of a training step: whoever is out of it takes part with zeros.

    They must be such that zeros are neutral: a sum, a maximum of what is not negative, an all_gather whose receivers
    know empty rows, a broadcast that any rank's tensor serves. On groups without a participant nothing changes.
    """
    uneven: UnevenInputs | None = getattr(group, "_uneven_inputs", None)
    if uneven is None:
        yield
        return
    before, uneven.role = uneven.role, STEP
    try:
        yield
    finally:
        uneven.role = before


def absent_ranks(group: Any) -> list[int]:
    """The ranks that were out of the latest step of `group`."""
    return list(group.symm_mem.core.absent) if getattr(group, "_uneven_inputs", None) is not None else []
