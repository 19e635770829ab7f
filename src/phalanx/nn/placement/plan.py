"""Decide where each layer goes, from what the layers cost and what the devices may hold. The decision is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NoReturn

import torch

from phalanx.nn.placement.devices import Room, format_bytes
from phalanx.partition import LayerCost

Balance = Literal["memory", "time"] | Sequence[int]


@dataclass(frozen=True)
class PlacedLayer:
    """It is a layer and its device.

    `with_layer` names the layer whose tensors it shares, and which it therefore follows.
    """

    name: str
    device: int
    seconds: float
    parameter_bytes: int
    memory_bytes: int
    received_bytes: int
    with_layer: str = ""


@dataclass(frozen=True)
class Placement:
    """It says which layer is on which device; `print` shows it as a table."""

    rooms: tuple[Room, ...]
    layers: tuple[PlacedLayer, ...]

    @property
    def devices(self) -> list[torch.device]:
        """Return the device of each layer."""
        return [self.rooms[layer.device].device for layer in self.layers]

    def memory_bytes(self, device: int) -> int:
        """Return what the layers on the device with this number need."""
        return sum(layer.memory_bytes for layer in self.layers if layer.device == device)

    @property
    def transferred_bytes(self) -> int:
        """Return the bytes that go from device to device in one forward."""
        return sum(layer.received_bytes for layer in self.layers)

    def __str__(self) -> str:
        """Return a row for each layer, and one for each device."""
        rows = [("layer", "device", "time", "parameters", "memory", "receives", "")]
        for layer in self.layers:
            device = str(self.rooms[layer.device].device)
            arriving = format_bytes(layer.received_bytes) if layer.received_bytes else ""
            note = f"with {layer.with_layer}" if layer.with_layer else ""
            sizes = format_bytes(layer.parameter_bytes), format_bytes(layer.memory_bytes)
            rows.append((layer.name, device, _milliseconds(layer.seconds), *sizes, arriving, note))
        rows.append(("",) * 7)
        for number, room in enumerate(self.rooms):
            here = [layer for layer in self.layers if layer.device == number]
            seconds = sum(layer.seconds for layer in here)
            parameters = sum(layer.parameter_bytes for layer in here)
            budget = f"of {format_bytes(room.budget)}" if room.budget is not None else ""
            count = f"{len(here)} layer{'s' * (len(here) != 1)}"
            sizes = format_bytes(parameters), format_bytes(self.memory_bytes(number))
            received = sum(layer.received_bytes for layer in here)
            rows.append(
                (
                    count,
                    str(room.device),
                    _milliseconds(seconds),
                    *sizes,
                    format_bytes(received) if received else "",
                    budget,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        lines = [
            "  ".join(
                cell.ljust(width) if i in (0, 1, 6) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join(lines)


def memory_of(cost: LayerCost, *, training: bool, optimizer_state: int) -> int:
    """Return what a layer needs while the model runs: parameters, gradients, optimizer state, activations."""
    if not training:
        return cost.parameter_bytes + cost.output_bytes
    return (2 + optimizer_state) * cost.parameter_bytes + max(cost.saved_bytes, cost.output_bytes)


def decide_placement(
    costs: Sequence[LayerCost],
    memory: Sequence[int],
    homes: Sequence[int],
    reads: Mapping[int, Sequence[int]],
    rooms: Sequence[Room],
    balance: Balance,
) -> Placement:
    """Cut the layers into runs, a device each, in the devices' order; a layer that is tied follows its home.

    Without budgets every device gets a layer. With budgets as few devices are used as hold the model, the first ones:
    each further one costs transfers and saves no time, because they work one after another. Of all such cuts the one is
    taken whose fullest device is as empty as can be, in its share of memory or in time.

    Arguments:
        memory: bytes of each layer.
        homes: for each layer the one with which it must be, or itself.
        reads: for each layer those whose values it needs.
        balance: what is to be alike; or how many layers each device gets.

    Raises:
        ValueError: a layer is larger than any device, no cut fits, or there are too few layers; which, and by how much.
    """
    names = [cost.name for cost in costs]
    # a layer that follows another counts where that one is
    weight, held = [0.0] * len(costs), [0] * len(costs)
    for index, home in enumerate(homes):
        held[home] += memory[index]
        weight[home] += memory[index] if balance != "time" else costs[index].seconds
    free = [index for index, home in enumerate(homes) if home == index]
    if isinstance(balance, str):
        _check_largest(names, held, homes, rooms)
        ends = _cut(free, weight, held, rooms, relative=balance == "memory")
        if ends is None:
            _refuse(names, held, homes, rooms)
    else:
        counts = list(balance)
        if len(counts) != len(rooms) or sum(counts) != len(costs) or any(count < 1 for count in counts):
            raise ValueError(
                f"place: balance {counts} does not share out {len(costs)} layers over {len(rooms)} devices, "
                "at least one each"
            )
        ends = list(accumulate(counts))
    device_of = [next(d for d, end in enumerate(ends) if index < end) for index in range(len(costs))]
    device_of = [device_of[home] for home in homes]
    placed = []
    for index, cost in enumerate(costs):
        sources = [source for source in reads.get(index, ()) if device_of[source] != device_of[index]]
        already = {s for i in range(index) if device_of[i] == device_of[index] for s in reads.get(i, ())}
        placed.append(
            PlacedLayer(
                cost.name,
                device_of[index],
                cost.seconds,
                cost.parameter_bytes,
                memory[index],
                sum(costs[source].output_bytes for source in sources if source not in already),
                names[homes[index]] if homes[index] != index else "",
            )
        )
    return Placement(tuple(rooms[: max(device_of) + 1]), tuple(placed))


def _cut(
    free: Sequence[int], weight: Sequence[float], held: Sequence[int], rooms: Sequence[Room], *, relative: bool
) -> list[int] | None:
    """Return before which layer each device's run ends; None if there is no such cut."""
    budgets = all(room.budget is not None for room in rooms)
    for num_devices in range(1 if budgets else len(rooms), len(rooms) + 1):
        ends = _cut_over(free, weight, held, rooms[:num_devices], relative=relative)
        if ends is not None:
            return ends
    return None


def _cut_over(
    free: Sequence[int], weight: Sequence[float], held: Sequence[int], rooms: Sequence[Room], *, relative: bool
) -> list[int] | None:
    """Return the best of all cuts over exactly these devices, by dynamic programming: devices times layers² steps."""
    count = len(weight)
    weights, bytes_ = [0.0, *accumulate(weight)], [0, *accumulate(held)]
    starts = [*free, count]  # a run begins with a layer that is free: an empty one would only hold followers
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for room in rooms:
        table: dict[int, tuple[float, float, int]] = {}
        for begin, (dearest, squares, _) in best[-1].items():
            for end in starts:
                if end <= begin:
                    continue
                need = bytes_[end] - bytes_[begin]
                if room.budget is not None and need > room.budget:
                    break
                cost = weights[end] - weights[begin]
                if relative and room.budget is not None:
                    cost /= room.budget
                found = (max(dearest, cost), squares + cost * cost, begin)
                table[end] = min(table.get(end, found), found)
        best.append(table)
    if count not in best[-1]:
        return None
    ends, end = [], count
    for table in reversed(best[1:]):
        ends.append(end)
        end = table[end][2]
    return ends[::-1]


def _check_largest(names: Sequence[str], held: Sequence[int], homes: Sequence[int], rooms: Sequence[Room]) -> None:
    if any(room.budget is None for room in rooms):
        return
    roomiest = max(rooms, key=lambda room: room.budget or 0)
    too_large = [index for index, need in enumerate(held) if need > (roomiest.budget or 0)]
    if too_large:
        index = max(too_large, key=lambda index: held[index])
        tied = [names[i] for i, home in enumerate(homes) if home == index and i != index]
        more = f", with {', '.join(tied)}, which share{'s' * (len(tied) == 1)} its tensors," if tied else ""
        raise ValueError(
            f"place: layer {names[index]!r}{more} needs {format_bytes(held[index])}, and the largest device, "
            f"{roomiest.device}, may hold {format_bytes(roomiest.budget or 0)}. Name modules inside of it in "
            "split_points=, so that it can be cut, or use a smaller batch."
        )


def _refuse(names: Sequence[str], held: Sequence[int], homes: Sequence[int], rooms: Sequence[Room]) -> NoReturn:
    """Raise an error that says why there is no cut."""
    free = sum(home == index for index, home in enumerate(homes))
    if free < len(rooms) and any(room.budget is None for room in rooms):
        tied = len(names) - free
        why = f", {tied} of which must be with another because they share its tensors" if tied else ""
        raise ValueError(
            f"place: {len(names)} layer{'s' * (len(names) != 1)} ({', '.join(names[:6])}{', …' * (len(names) > 6)})"
            f"{why} cannot be shared out over {len(rooms)} devices. Name modules inside of them in split_points=, or "
            "give fewer devices."
        )
    total = sum(room.budget or 0 for room in rooms)
    largest = max(range(len(held)), key=lambda index: held[index])
    raise ValueError(
        f"place: the layers need {format_bytes(sum(held))}, and no cut between them fits the devices, which may hold "
        f"{format_bytes(total)} together ({', '.join(f'{r.device} {format_bytes(r.budget or 0)}' for r in rooms)}). "
        f"The largest layer is {names[largest]!r} with {format_bytes(held[largest])}."
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
