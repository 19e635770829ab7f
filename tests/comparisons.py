"""Comparisons of tensors that leave no room for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def assert_equal(actual: Any, expected: Any, *what: object) -> None:
    """Raise AssertionError unless both hold the same values, shapes and dtypes, also in sequences and dicts.

    Arguments:
        what: what is compared, for the message.
    """
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, msg=lambda found: f"{', '.join(map(str, what))}: {found}" if what else found
    )


def assert_same_on_all_ranks(states: Sequence[Any]) -> None:
    """Raise AssertionError unless what the ranks returned is equal, naming the first rank that has another."""
    for rank, state in enumerate(states):
        assert_equal(state, states[0], f"rank {rank}")


def all_equal(these: Sequence[Tensor], those: Sequence[Tensor]) -> bool:
    """Say whether both hold the same number of tensors, with the same values in turn."""
    return len(these) == len(those) and all(map(torch.equal, these, those))
