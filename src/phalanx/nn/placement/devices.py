"""List the devices on which a model is placed, and how many bytes each may hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

DeviceId = int | str | torch.device

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Room:
    """It is a device, and how many bytes it may hold; None means no limit."""

    device: torch.device
    budget: int | None = None


def read_rooms(devices: Sequence[DeviceId] | Mapping[DeviceId, int | str]) -> list[Room]:
    """Return the devices in order. They come as names, numbers or torch.devices; sizes in bytes or as '10 GiB'.

    Raises:
        ValueError: there is none, one is no device, or a size is none. All that is wrong is told.
        TypeError: it is one device, not several.
    """
    if isinstance(devices, str | torch.device | int):
        raise TypeError(f"place: devices must be a list, or budgets by device, got {devices!r}; for one: module.to()")
    problems: list[str] = []
    rooms = []
    for device_id in devices:
        try:
            device = torch.device(device_id)
        except (RuntimeError, TypeError) as error:
            problems.append(f"{device_id!r} is no device ({str(error).splitlines()[0]})")
            continue
        budget = None
        if isinstance(devices, Mapping):
            try:
                budget = parse_bytes(devices[device_id])
            except ValueError as error:
                problems.append(f"{device_id}: {error}")
        rooms.append(Room(device, budget))
    if not rooms and not problems:
        problems.append("there is no device to place the model on")
    if problems:
        raise ValueError("place: " + "; ".join(problems))
    return rooms


def parse_bytes(size: int | str) -> int:
    """Return `size` in bytes: it is a number, or text such as '10 GiB', '500MB'.

    Raises:
        ValueError: it is neither, or not positive.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ValueError(f"a budget is a number of bytes or text such as '10 GiB', got {size!r}")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None:
            raise ValueError(f"a budget is a number of bytes or text such as '10 GiB', got {size!r}")
        number, unit = match.groups()
        size = int(float(number) * _UNITS[unit.upper()])
    if size <= 0:
        raise ValueError(f"a budget must be positive, got {size}")
    return size


def format_bytes(size: float) -> str:
    """Return a size as text: `1.5 GiB`, `12.0 MiB`, `300 B`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"
