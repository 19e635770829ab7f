"""Register who trains over a group, and mark its calls that are part of a training step (`transport/uneven`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from phalanx.backend.shared import sharing_group
from phalanx.backend.torch_integration.groups import phalanx_group
from phalanx.core_numbers import STEP
from phalanx.transport.uneven import Participant, UnevenInputs


def take_part(group: Any, participant: Participant) -> bool:
    """Let steps over `group` do without ranks that wait elsewhere, where that is possible; return whether it is.

    All ranks do this for the same participants in the same order.
    """
    ours = sharing_group(group)
    if ours is None or ours.size() == 1:
        return False
    if ours._uneven_inputs is None:
        assert ours._shared_memory is not None
        ours._uneven_inputs = ours._shared_memory.uneven = UnevenInputs(ours)
        ours.symm_mem.core.allow_uneven()
    ours._uneven_inputs.add(participant)
    return True


@contextlib.contextmanager
def training_step(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Make collectives of `group` inside part of a training step: a rank that is out of it takes part with zeros.

    They must be such that zeros are neutral: a sum, a maximum of what is not negative, an all_gather whose receivers
    know empty rows, a broadcast that any rank's tensor serves. On groups without a participant nothing changes.
    """
    uneven = _uneven_inputs(group)
    if uneven is None:
        yield
        return
    before, uneven.role = uneven.role, STEP
    try:
        yield
    finally:
        uneven.role = before


def absent_ranks(group: Any) -> list[int]:
    """Return the ranks that were out of the latest step of `group`."""
    ours = phalanx_group(group)
    return list(ours.symm_mem.core.absent) if ours is not None and ours._uneven_inputs is not None else []


def can_be_uneven(group: Any) -> bool:
    """Return whether some participant has made steps over `group` that do without ranks (see `take_part`)."""
    return _uneven_inputs(group) is not None


def _uneven_inputs(group: Any) -> UnevenInputs | None:
    ours = phalanx_group(group)
    return None if ours is None else ours._uneven_inputs
