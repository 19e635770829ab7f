"""The same function over Gloo and over Phalanx: what the ranks return must be the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

import phalanx._comm.backend.create
import phalanx._comm.backend.process_group  # noqa: F401 - imported once here, not once in each rank of each test
from phalanx.testing import run_ranks


def assert_same_as_gloo(
    fn: Callable[..., Any], world_size: int, *args: Any, atol: float = 0.0, timeout: float = 60.0
) -> list[Any]:
    """Run `fn` on the ranks of both backends, compare (nested lists, tuples and dicts of tensors), return ours.

    With two ranks the sums of both have the same bits. With more, Gloo's depend on its order: give an `atol`.
    """
    ours = run_ranks(fn, world_size, *args, backend="phalanx", timeout=timeout)
    theirs = run_ranks(_keep_the_group, world_size, fn, *args, backend="gloo", timeout=timeout)
    compare(ours, theirs, atol)
    return ours


_groups: list[Any] = []


def _keep_the_group(rank: int, world_size: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` with a reference to the group that stays until the process ends.

    What a future's callbacks hold, as PowerSGD's hook has them, Gloo's own thread lets go; if that is the last
    reference to the group, the thread waits for itself, and the process aborts. It was seen once.
    """
    _groups.append(torch.distributed.group.WORLD)
    return fn(rank, world_size, *args)


def compare(ours: Any, theirs: Any, atol: float) -> None:
    """Raise AssertionError unless both are the same, through lists, tuples and dicts; tensors may differ by `atol`."""
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, equal_nan=True)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            compare(ours[key], theirs[key], atol)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for mine, reference in zip(ours, theirs, strict=True):
            compare(mine, reference, atol)
    else:
        assert ours == theirs
