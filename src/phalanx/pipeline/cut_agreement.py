"""Agree on where a model is cut: one rank measures and decides for all."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch.distributed as dist

from phalanx._base.partition.layers import LayerList
from phalanx._base.partition.measure import LayerCost
from phalanx.errors import MismatchError
from phalanx.pipeline.cut import Balance, decide_counts, measure
from phalanx.pipeline.schedule import Schedule


class Cut(NamedTuple):
    """A `Cut` has the layers per stage, the basis of the decision, and the layers' costs if measured."""

    counts: list[int]
    reason: str
    costs: list[LayerCost] | None


def agree_on_cut(
    layers: LayerList,
    balance: Balance,
    planned: Schedule,
    example: Any,
    checkpoint: str,
    group: dist.ProcessGroup,
    data_group: dist.ProcessGroup | None,
) -> Cut:
    """Compare the arguments of all ranks, and let the first rank measure and decide for all pipelines. Collective.

    Raises:
        MismatchError: ranks have different arguments.
        Any error of the first rank's decision, on every rank.
    """
    asked = (layers.names, planned.name, planned.num_stages, planned.micro_batches, checkpoint)
    heard: list[Any] = [None] * group.size()
    dist.all_gather_object(heard, asked, group=group)
    if wrong := [rank for rank, other in enumerate(heard) if other != heard[0]]:
        raise MismatchError(
            f"Pipeline: rank {wrong[0]} has another model or other arguments than rank 0: "
            f"{_difference(heard[0], heard[wrong[0]])}"
        )
    decided: list[Any] = [None]
    decides = group.rank() == 0 and (data_group is None or data_group.rank() == 0)
    if decides:
        try:
            costs = measure(layers, balance, example)
            decided = [Cut(*decide_counts(layers, balance, planned, costs, recompute=checkpoint != "never"), costs)]
        except Exception as error:  # all ranks raise it
            decided = [error]
    if data_group is not None and group.rank() == 0:
        dist.broadcast_object_list(decided, group=data_group, group_src=0)
    dist.broadcast_object_list(decided, group=group, group_src=0)
    if isinstance(decided[0], Exception):
        raise decided[0]
    return cast(Cut, decided[0])


def _difference(first: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    what = ("layers", "schedule", "stages", "micro_batches", "checkpoint")
    return "; ".join(f"{name} {b} for {a}" for name, a, b in zip(what, first, other, strict=True) if a != b)
