"""Page-lock host memory, because CUDA devices copy fast from and to such memory, and asynchronously."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable; without it a lock counts for the current device


def lock_pages(address: int, nbytes: int, flags: int = 0) -> int:
    """Page-lock memory, in unlocked pages, until `unlock_pages`; return 0, or CUDA's error.

    Cost: the pages become resident.
    """
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(address, nbytes, flags))
    if error:
        with contextlib.suppress(RuntimeError):  # else the next kernel's launch would report this error as its own
            torch.zeros(1, device="cuda")
    return error


def unlock_pages(address: int) -> None:
    """Undo the `lock_pages` that began at `address`."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(address)
