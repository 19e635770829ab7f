"""Create groups from a group's ranks: split it, as `torch.distributed.split_group` does, or merge it with others."""

from __future__ import annotations

import types
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore

from phalanx._base.torch_versions import release_of

TORCH_SPLITS_ON_CPU = release_of(torch.__version__) >= (2, 15)
"""Whether torch's `split_group` works without an accelerator, and Gloo splits groups."""


class Splits:
    """`Splits` counts the splits of a parent group, even on members outside of a split, so that all counts agree."""

    def __init__(self) -> None:
        self._num_splits = 0
        self._num_undescribed = 0

    def split(
        self,
        parent: Any,
        ranks: Sequence[int],
        timeout: timedelta | None,
        backend_options: Any,
        name: str | None,
        description: str | None,
    ) -> Any:
        """Return the group of the parent's `ranks`, in their order; None if this rank is not one of them.

        The timeout and the options default to the parent's. The members form the group under their own prefix of the
        parent's store. The prefix does not contain `name`: torch derives the name from a counter that only some ranks
        advance when a group of some ranks is split, so members may receive different names.

        Raises:
            ValueError: `ranks` is empty, repeats a rank, or has a rank that is not in the parent.
            DeadlineError: some member never joined.
        """
        if problem := _problem(ranks, parent.size()):
            raise ValueError(f"split_group of group {parent.group_name!r}: {problem}")
        number = self._num_splits
        self._num_splits += 1
        if description is None:
            description = f"{parent.group_desc}:split:{self._num_undescribed}"
            self._num_undescribed += 1
        if parent.rank() not in ranks:
            return None
        return form_group(
            parent,
            PrefixStore(f"split/{number}/{'-'.join(map(str, ranks))}/", parent.get_group_store()),
            list(ranks).index(parent.rank()),
            len(ranks),
            timeout if timeout is not None else parent.options._timeout,
            name=name or f"{parent.group_name}:split:{list(ranks)}",
            description=description,
            ranks=[parent.options.global_ranks_in_group[rank] for rank in ranks],
            backend_options=backend_options,
        )


def form_group(
    parent: Any,
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    name: str = "",
    description: str = "",
    ranks: Sequence[int] = (),
    backend_options: Any = None,
) -> Any:
    """Form a group of `size` ranks in `store`, created in the same way as `parent`. Each of these ranks calls this.

    The options default to the parent's.

    Raises:
        DeadlineError: some member never joined.
    """
    options = types.SimpleNamespace(
        store=store,
        group_rank=rank,
        group_size=size,
        timeout=timeout,
        group_id=name,
        global_ranks_in_group=list(ranks),
    )
    group = parent.create_group(options, parent.backend_options if backend_options is None else backend_options)
    group._set_group_desc(description)
    return group


def _problem(ranks: Sequence[int], size: int) -> str:
    if not ranks:
        return "no ranks"
    if len(set(ranks)) < len(ranks):
        return f"a rank is repeated in {list(ranks)}"
    if strangers := [rank for rank in ranks if not 0 <= rank < size]:
        return f"it has {size} ranks, and no rank {', '.join(map(str, strangers))}"
    return ""
