"""Decide where a model is cut into stages: where the user says, or so that the stages' costs are balanced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, cast

import torch.distributed as dist

from phalanx._base.partition.layers import LayerList
from phalanx._base.partition.measure import LayerCost, measure_layers
from phalanx._base.partition.parts import LayerRange
from phalanx.errors import MismatchError
from phalanx.pipeline.schedule import PipelineSchedule

Balance = Literal["auto", "time", "memory"] | Sequence[int] | Sequence[str]


@dataclass(frozen=True)
class StageRow:
    """A `StageRow` describes one stage in the table of a cut."""

    stage: int
    rank: int
    first: str
    last: str
    num_layers: int
    parameter_bytes: int
    seconds: float | None


@dataclass(frozen=True)
class CutPlan:
    """A `CutPlan` describes how a model is cut; `str` returns it as a table."""

    rows: tuple[StageRow, ...]
    reason: str

    @property
    def counts(self) -> list[int]:
        """Return the number of layers of each stage, in the form that `balance=` accepts."""
        return [row.num_layers for row in self.rows]

    def __str__(self) -> str:
        lines = [f"{'stage':>5}  {'rank':>4}  {'layers':>6}  {'parameters':>10}  {'time':>9}  from .. to"]
        for row in self.rows:
            time = "" if row.seconds is None else f"{row.seconds * 1e3:.3g} ms"
            span = row.first if row.first == row.last else f"{row.first} .. {row.last}"
            lines.append(
                f"{row.stage:>5}  {row.rank:>4}  {row.num_layers:>6}  {_bytes(row.parameter_bytes):>10}  {time:>9}  "
                f"{span}"
            )
        return "\n".join([*lines, f"balanced by {self.reason}"])


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def split_points(wanted: Balance) -> list[str]:
    """Return the module names in a balance; none if it is a word or a list of numbers."""
    return [] if isinstance(wanted, str) else [name for name in wanted if isinstance(name, str)]


def check_balance(wanted: Any) -> None:
    """Raise unless `wanted` is a known word, a list of layer counts or a list of module names.

    Raises:
        TypeError: `wanted` is none of these.
        ValueError: `wanted` is an unknown word.
    """
    if isinstance(wanted, str):
        if wanted not in ("auto", "time", "memory"):
            raise ValueError(
                f"Pipeline: balance must be 'auto', 'time', 'memory', numbers of layers or names, got {wanted!r}"
            )
        return
    kinds = {type(item) for item in wanted} if isinstance(wanted, Sequence) else {object}
    if kinds not in ({int}, {str}):
        raise TypeError(
            "Pipeline: balance takes one number of layers for each stage, [4, 4], or the names of the modules at which "
            f"a stage begins, ['layers.4'], got {wanted!r}"
        )


def measure(layers: LayerList, wanted: Balance, example: Any) -> list[LayerCost] | None:
    """Return the layers' costs, measured on `example`; None without an example, or if `wanted` lists the cut itself.

    Raises:
        ValueError: `wanted` is "time", and there is no example.
    """
    if example is None:
        if wanted == "time":
            raise ValueError(
                "Pipeline: balance='time' runs every layer to measure it: give an example of one micro-batch, "
                "example=x[:4]"
            )
        return None
    if not isinstance(wanted, str):
        return None
    if isinstance(example, Mapping):
        return measure_layers(layers, (), example)
    return measure_layers(layers, example if isinstance(example, tuple) else (example,))


def decide_counts(
    layers: LayerList,
    wanted: Balance,
    schedule: PipelineSchedule,
    costs: Sequence[LayerCost] | None,
    *,
    recompute: bool = False,
) -> tuple[list[int], str]:
    """Return the number of layers of each stage, and the basis of the decision.

    Raises:
        ValueError: the model cannot be cut in this way.
    """
    stages, names = schedule.num_stages, layers.names
    if len(names) < stages:
        raise ValueError(
            f"Pipeline: {type(layers.root).__name__} has {len(names)} layer{'s' * (len(names) != 1)} to cut between "
            f"({', '.join(names)}), too few for {stages} stages. Take fewer stages, or name split points inside of "
            "them: balance=['block.layer', ...]."
        )
    if not isinstance(wanted, str):
        if all(isinstance(item, int) for item in wanted):
            return _by_numbers([int(item) for item in wanted], names, stages), "the given numbers of layers"
        return _by_names([str(item) for item in wanted], names, stages), "the given names of modules"
    if costs is None:
        sizes = [float(size) for size in _parameter_bytes(layers)]
        return balance([[size + 1e-3 * (max(sizes) or 1.0) for size in sizes]] * stages), "the size of parameters"
    if wanted == "memory":
        in_flight = [schedule.in_flight(stage) for stage in range(stages)]
        table = [[float(2 * c.parameter_bytes + n * c.saved_bytes) for c in costs] for n in in_flight]
        return balance(table), "measured memory"
    return balance([[c.seconds + recompute * c.forward_s for c in costs]] * stages), "measured time"


def balance(costs: Sequence[Sequence[float]]) -> list[int]:
    """Return how many consecutive layers each stage gets, at least one, so that the largest stage cost is minimal.

    For m micro-batches, a pipeline takes the sum of its stages' costs plus m - 1 times the maximum. The sum is fixed,
    so the maximum decides. Ties are broken by the smaller sum of squares, which favours equal stages.

    Arguments:
        costs: for each stage, the costs of all layers; at least as many layers as stages.

    Cost: stages * layers² additions. The maximum is optimal, not a heuristic.
    """
    stages, count = len(costs), len(costs[0])
    # best[k]: for the first k layers in the stages so far, (maximal cost, sum of squares, begin of the last stage)
    none = (float("inf"), float("inf"), 0)
    best: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] + [none] * count
    tables = []
    for stage, own in enumerate(costs):
        total = [0.0, *accumulate(own)]
        table = [none] * (count + 1)
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            for begin in range(stage, end):
                cost = total[end] - total[begin]
                dearest, squares, _ = best[begin]
                table[end] = min(table[end], (max(dearest, cost), squares + cost * cost, begin))
        tables.append(table)
        best = table
    counts, end = [], count
    for table in reversed(tables):
        begin = table[end][2]
        counts.append(end - begin)
        end = begin
    return counts[::-1]


def _by_numbers(counts: list[int], names: Sequence[str], stages: int) -> list[int]:
    if len(counts) != stages or sum(counts) != len(names) or min(counts) < 1:
        raise ValueError(
            f"Pipeline: balance {counts} is not {stages} numbers of at least one layer that add up to {len(names)}, "
            f"the layers of the model: {', '.join(names)}"
        )
    return counts


def _by_names(points: list[str], names: Sequence[str], stages: int) -> list[int]:
    if len(points) != stages - 1:
        raise ValueError(
            f"Pipeline: balance names {len(points)} modules at which a stage begins ({', '.join(points)}); "
            f"{stages} stages need {stages - 1}"
        )
    begins = [0]
    for point in points:
        inside = [at for at, name in enumerate(names) if name == point or name.startswith(point + ".")]
        if not inside:
            raise ValueError(f"Pipeline: no layer begins at {point!r}, so no stage can; layers: {', '.join(names)}")
        if inside[0] <= begins[-1]:
            raise ValueError(
                f"Pipeline: the stage that begins at {point!r} would be empty or out of order: name split points in "
                "the order in which they run, and not the first layer"
            )
        begins.append(inside[0])
    begins.append(len(names))
    return [end - begin for begin, end in pairwise(begins)]


def describe_cut(
    layers: LayerList,
    parts: Sequence[LayerRange],
    schedule: PipelineSchedule,
    reason: str,
    costs: Sequence[LayerCost] | None,
) -> CutPlan:
    """Return the table of the cut."""
    sizes, rows, at = _parameter_bytes(layers), [], 0
    for part in parts:
        end = at + len(part.layers)
        seconds = None if costs is None else sum(cost.seconds for cost in costs[at:end])
        rows.append(
            StageRow(
                part.index,
                schedule.rank_of(part.index),
                part.layers[0].name,
                part.layers[-1].name,
                end - at,
                sum(sizes[at:end]),
                seconds,
            )
        )
        at = end
    return CutPlan(tuple(rows), reason)


def _parameter_bytes(layers: LayerList) -> list[int]:
    sizes = []
    for layer in layers.layers:
        called = [layers.root.get_submodule(str(n.target)) for n in layer.nodes if n.op == "call_module"]
        sizes.append(sum(p.numel() * p.element_size() for module in called for p in module.parameters()))
    return sizes


def require_one_owner_of_buffers(layers: LayerList, parts: Sequence[LayerRange]) -> None:
    """Refuse a module that has buffers and is called in two stages: the stages' copies would drift apart.

    Raises:
        ValueError: there is such a module.
    """
    users: dict[int, tuple[str, int]] = {}
    for part in parts:
        for name in part.modules:
            for buffer in layers.root.get_submodule(name).buffers():
                first, stage = users.setdefault(id(buffer), (name, part.index))
                if stage != part.index:
                    raise ValueError(
                        f"Pipeline: layer {first!r} has buffers and is called in stages {stage} and {part.index}: each "
                        "would have its own, and they would drift apart. Cut where its calls are in one stage."
                    )


class Cut(NamedTuple):
    """A `Cut` has each stage's number of layers, the basis of that decision, and the layers' costs if measured."""

    counts: list[int]
    reason: str
    costs: list[LayerCost] | None


def agree_on_cut(
    layers: LayerList,
    balance: Balance,
    planned: PipelineSchedule,
    example: Any,
    checkpoint: str,
    group: dist.ProcessGroup,
    data_group: dist.ProcessGroup | None,
) -> Cut:
    """Compare the ranks' arguments, and let the first rank of the first pipeline decide for all. Collective.

    Raises:
        MismatchError: ranks of this pipeline have different models or arguments.
        Any error that the first rank's decision raises, on every rank.
    """
    mine = (layers.names, planned.name, planned.num_stages, planned.micro_batches, checkpoint)
    arguments: list[Any] = [None] * group.size()
    dist.all_gather_object(arguments, mine, group=group)
    if wrong := [rank for rank, other in enumerate(arguments) if other != arguments[0]]:
        raise MismatchError(
            f"Pipeline: rank {wrong[0]} has another model or other arguments than rank 0: "
            f"{_difference(arguments[0], arguments[wrong[0]])}"
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
