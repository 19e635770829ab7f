"""The same function over Gloo and over Phalanx: what the ranks return must be the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import phalanx.backend.create
import phalanx.backend.process_group  # noqa: F401 - imported once here, not once in each rank of each test
from phalanx.testing import run_ranks


def assert_same_as_gloo(
    fn: Callable[..., Any], world_size: int, *args: Any, atol: float = 0.0, timeout: float = 60.0
) -> list[Any]:
    """Run `fn` on the ranks of both backends, compare (nested lists, tuples and dicts of tensors), return ours.

    With two ranks the sums of both have the same bits. With more, Gloo's depend on its order: give an `atol`.
    """
    ours = run_ranks(fn, world_size, *args, backend="phalanx", timeout=timeout)
    theirs = run_ranks(fn, world_size, *args, backend="gloo", timeout=timeout)
    compare(ours, theirs, atol)
    return ours


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
