"""Check that this process has a device for tensors."""

from __future__ import annotations

import torch


def require_device(map_location: object, what: str) -> None:
    """Refuse a device that this process does not have; names that only torch.load knows pass."""
    if not isinstance(map_location, (str, torch.device)):
        return
    try:
        torch.empty(0, device=map_location)
    except Exception as error:  # RuntimeError, AssertionError, AcceleratorError: devices raise different errors
        first_line = (str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")
        raise ValueError(
            f"{what}: map_location={str(map_location)!r} cannot be used in this process: "
            f"{first_line.partition('. ')[0]}. Load to the CPU (map_location='cpu', the default), or to a "
            "device that is here."
        ) from error
