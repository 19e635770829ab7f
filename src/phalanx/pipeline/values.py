"""Check the values sent from stage to stage, and broadcast a result to all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from phalanx._base.partition.parts import LayerRange
from phalanx._comm.transport.memory_order import Strides, find_strides, flatten, restore
from phalanx.pipeline.nested import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

_CONSTANTS = (int, float, bool, str, complex, type(None), torch.dtype, torch.device)


class ValueShapes:
    """`ValueShapes` checks that values sent between stages have the dtypes and shapes of the first micro-batch."""

    def __init__(self) -> None:
        self._first: dict[fx.Node, tuple[int, int, list[Any]]] = {}

    def begin(self) -> None:
        """Begin a new step, whose dtypes and shapes may differ."""
        self._first.clear()

    def check(
        self, part: LayerRange, micro_batch: int, rows: int, nodes: Sequence[fx.Node], values: Sequence[Any]
    ) -> None:
        """Raise unless all values can be sent and match the step's first micro-batch in all but the number of rows.

        The samples may be in a dimension other than the first, as in the state of an nn.LSTM; their number may vary.

        Raises:
            TypeError: a value, or an element of a container, is neither a tensor nor a plain constant.
            ValueError: a tensor's dtype or number of dimensions differs, or a size that is not proportional to `rows`.
        """
        for node, value in zip(nodes, values, strict=True):
            leaves = [value] if isinstance(value, Tensor) else tree_flatten(value)[0]
            for leaf in leaves:
                if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                    raise TypeError(
                        f"layer {_maker(part, node)!r} returns a {type(leaf).__name__}, which is not a tensor, "
                        f"and a later stage uses it: only tensors, numbers and containers of them can be sent to "
                        "another stage. Return its tensors, or cut elsewhere."
                    )
            form = [_form(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            before, had, known = self._first.setdefault(node, (micro_batch, rows, form))
            if form != known and not _differ_in_rows(form, rows, known, had):
                raise ValueError(
                    f"layer {_maker(part, node)!r} returns {_words(form)} for micro-batch {micro_batch}, and "
                    f"{_words(known)} for micro-batch {before}: the micro-batches of a step may differ in the first "
                    "dimension only. Pad the samples of a mini-batch to one size."
                )


def _differ_in_rows(form: list[tuple[Any, ...]], rows: int, known: list[tuple[Any, ...]], had: int) -> bool:
    if len(form) != len(known):
        return False
    return all(
        mine[:2] == first[:2] and all(a == b or a * had == b * rows for a, b in zip(mine[2:], first[2:], strict=True))
        for mine, first in zip(form, known, strict=True)
    )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.dim(), *tensor.shape[1:])


def _words(form: list[tuple[Any, ...]]) -> str:
    return ", ".join(
        f"{str(dtype).removeprefix('torch.')} of shape ({', '.join(['N', *map(str, sizes)][:dim])})"
        for dtype, dim, *sizes in form
    )


def _maker(part: LayerRange, node: fx.Node) -> str:
    return next((layer.name for layer in part.layers if node in layer.nodes), str(node))


def share_result(result: Any, group: dist.ProcessGroup, owner: int) -> Any:
    """Return the owner's result on every rank; other ranks get its tensors on the CPU. All ranks call it."""
    mine = group.rank() == owner
    leaves, tree = tree_flatten(result)
    described: list[Any] = [
        (treespec_dumps(tree), [_form_of(v) if isinstance(v, Tensor) else _Constant(v) for v in leaves])
        if mine
        else None
    ]
    dist.broadcast_object_list(described, group=group, group_src=owner)
    text, forms = described[0]
    shared = []
    for at, form in enumerate(forms):
        if isinstance(form, _Constant):
            shared.append(form.value)
            continue
        shape, dtype, strides = form
        room = shape if strides is None else math.prod(shape)
        flat = flatten(leaves[at], strides).cpu() if mine else torch.empty(room, dtype=dtype, device="cpu")
        dist.broadcast(flat, group=group, group_src=owner)
        shared.append(restore(flat, shape, strides))
    return result if mine else tree_unflatten(shared, treespec_loads(text))


def _form_of(value: Tensor) -> tuple[tuple[int, ...], torch.dtype, Strides | None]:
    return tuple(value.shape), value.dtype, find_strides(value)


class _Constant:
    def __init__(self, value: Any) -> None:
        self.value = value
