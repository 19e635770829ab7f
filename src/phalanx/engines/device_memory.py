"""These protocols say what a kind of device must offer so that several processes can map its memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class MappedMemory(Protocol):
    """It is a piece of a device's memory, in this process."""

    @property
    def tensor(self) -> Tensor:
        """Return its bytes, on the device."""

    def close(self) -> None:
        """Unmap the memory. Nothing that was queued on the device may still use it; other processes keep their
        mapping.
        """


class DeviceMemory(Protocol):
    """It makes memory of one kind of device, and hands it to other processes as a file descriptor."""

    def create(self, device: torch.device, nbytes: int) -> tuple[int, MappedMemory]:
        """Return new memory of at least `nbytes`, and a descriptor for other processes, which the caller closes.

        Raises:
            OSError: the device, or its driver, cannot share memory in this way, or has no more.
        """

    def open(self, fd: int, device: torch.device, nbytes: int) -> MappedMemory:
        """Map the memory that another process made with the same `nbytes`. The descriptor stays the caller's.

        Raises:
            OSError: this process cannot map it, as when its device does not reach the other's.
        """
