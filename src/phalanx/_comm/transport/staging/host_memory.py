"""Allocate host memory to which and from which a device copies fast: page-locked, and shared by all ranks if possible.

small                       from PyTorch's own cache of page-locked memory, if the device is CUDA
64 KiB and more             in the ranks' symmetric memory, if they have some: a collective reads the other ranks'
                            staged tensors in place, and nothing is copied between ranks before the reduction
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._base.log import get_logger, warn_once
from phalanx._comm.symmetric_memory.scratch import Scratch

_logger = get_logger(__name__)
_PAGE = 4096
_LARGE_BYTES = 1 << 16
_LARGEST_BYTES = 1 << 34  # of address space; unused memory has no pages


def staging_bytes(heap_bytes: int) -> int:
    """Return the size of the part of a rank's heap that staging uses."""
    return min(_LARGEST_BYTES, heap_bytes // 8) // _PAGE * _PAGE


def block_bytes(nbytes: int) -> int:
    """Return the block size of a tensor of `nbytes`: a power of two in whole pages, so that blocks can be reused."""
    return max(_PAGE, 1 << (nbytes - 1).bit_length())


class HostMemory:
    """`HostMemory` allocates the host tensors in which a device's tensors are staged.

    `piece` is memory in this rank's symmetric heap, or None if there is no heap. Its blocks are page-locked when first
    used, and stay page-locked until `close`.
    """

    def __init__(self, device_type: str, piece: Tensor | None = None) -> None:
        self._is_cuda = device_type == "cuda"
        self._lock = threading.Lock()
        self._page_locked: dict[int, int] = {}
        self._scratch: Scratch | None = None
        if piece is not None:
            skip = -piece.data_ptr() % _PAGE
            self._scratch = Scratch(piece[skip : skip + (piece.numel() - skip) // _PAGE * _PAGE])

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised, contiguous tensor in host memory."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if self._scratch is None or nbytes < _LARGE_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._is_cuda)
        with self._lock:
            block = self._scratch.allocate(block_bytes(nbytes), torch.uint8)
            if self._is_cuda:
                self._lock_pages(block)
        return block[:nbytes].view(dtype).view(tuple(shape))

    def _lock_pages(self, block: Tensor) -> None:
        at = block.data_ptr()
        if at in self._page_locked:
            return
        error = lock_pages(at, block.numel())
        if error:
            warn_once(
                _logger,
                f"memory for staging could not be page-locked (CUDA error {error}), so copies to and from the GPU are "
                "slower. The limit on locked memory (ulimit -l) may be too low.",
            )
        self._page_locked[at] = error

    def close(self) -> None:
        """Unlock the pages, before the memory is freed."""
        with self._lock:
            blocks, self._page_locked = self._page_locked, {}
            self._scratch = None
        for at, error in blocks.items():
            if not error:
                unlock_pages(at)


# Page-lock host memory, because CUDA devices copy fast and asynchronously from and to such memory.

FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable; without it, memory is page-locked for the current device only


def lock_pages(address: int, nbytes: int, flags: int = 0) -> int:
    """Page-lock memory that is not page-locked yet, until `unlock_pages`; return 0, or CUDA's error code.

    Cost: the pages become resident.
    """
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(address, nbytes, flags))
    if error:
        with contextlib.suppress(RuntimeError):  # otherwise the next kernel launch would report this error as its own
            torch.zeros(1, device="cuda")
    return error


def unlock_pages(address: int) -> None:
    """Undo `lock_pages` of the memory at `address`."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(address)
