"""Refuse models in which a stage changes a tensor in place while another stage has a copy of that memory.

In one process, an in-place change of a tensor also changes its views. Across a cut, each value is sent separately, so
its copy does not change. In the first micro-batch of each mode, every stage records which of the values that it
receives or sends overlap, and which received values it changes. If the records of all stages show that the result would
differ from that of one process, the model is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, fx

from phalanx.pipeline.nested import tree_flatten


@dataclass(frozen=True)
class ValueAliases:
    """`ValueAliases` lists, by node name, which values of a stage overlap and which received values it changes."""

    stage: int
    pairs: tuple[tuple[str, str], ...] = ()
    written: tuple[str, ...] = ()


def find_pairs(values: Mapping[fx.Node, object]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of `values`, by node name, whose tensors overlap in memory."""
    tensors = [(str(node), leaf) for node, value in values.items() for leaf in tree_flatten(value)[0]]
    dense = [(name, leaf) for name, leaf in tensors if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    return tuple(
        dict.fromkeys(
            (one, other)
            for at, (one, first) in enumerate(dense)
            for other, second in dense[at + 1 :]
            if one != other and _overlap(first, second)
        )
    )


def _overlap(one: Tensor, other: Tensor) -> bool:
    memory = one.untyped_storage()
    if memory.data_ptr() != other.untyped_storage().data_ptr() or not one.numel() or not other.numel():
        return False
    if one.dtype != other.dtype:
        return True
    marks = torch.zeros(memory.nbytes() // one.element_size(), dtype=torch.bool, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def find_stale(seen: Sequence[ValueAliases], graph: fx.Graph, home: Mapping[fx.Node, int]) -> str:
    """Return why a stage would use an outdated copy of a value; "" if no stage would.

    `home` maps a node to its stage.
    """
    nodes = {str(node): node for node in graph.nodes}
    place = {node: at for at, node in enumerate(graph.nodes)}
    same: dict[str, set[str]] = {}
    for one, other in (pair for stage in seen for pair in stage.pairs):
        joined = same.get(one, {one}) | same.get(other, {other})
        for name in joined:
            same[name] = joined
    for stage in seen:
        for name in stage.written:
            begins = min(place[user] for user in nodes[name].users if home.get(user) == stage.stage)
            for other in sorted(same.get(name, {name}) - {name}, key=lambda name: place[nodes[name]]):
                if home[nodes[other]] < stage.stage and any(place[user] > begins for user in nodes[other].users):
                    return (
                        f"stage {stage.stage} changes the value {name!r} of an earlier stage in place, and {other!r}, "
                        "which shares its memory, is used after that, where an unchanged copy would be read. "
                        "Let the layer make a new tensor (inplace=False), or cut elsewhere."
                    )
    return ""


class CopyCheck:
    """A `CopyCheck` checks, in the first step of a mode, that no stage uses an outdated copy of a value.

    `home` maps a node of `graph` to its stage.
    """

    def __init__(self, graph: fx.Graph, home: Mapping[fx.Node, int]) -> None:
        self._graph, self._home = graph, home
        self._checked: set[tuple[bool, bool]] = set()

    def require_current(self, mode: tuple[bool, bool], seen: Iterable[ValueAliases], group: dist.ProcessGroup) -> None:
        """Raise if a stage would use an outdated copy. Collective. `seen` has the records of this rank's stages.

        Raises:
            ValueError: a stage would use an outdated copy. All ranks raise it; the message names the values.
        """
        if mode in self._checked or torch.is_inference_mode_enabled():
            return
        records: list[list[ValueAliases]] = [[] for _ in range(group.size())]
        dist.all_gather_object(records, list(seen), group=group)
        stale = find_stale([one for theirs in records for one in theirs], self._graph, self._home)
        if stale:
            raise ValueError(f"Pipeline: {stale}")
        self._checked.add(mode)
