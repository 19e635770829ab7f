"""Copies between a device and the host's memory, beside what the device computes.

    compute stream   backward ... reduction of a bucket ...            | forward: reads the parameters
    copy stream                        `--> gradient, to the host
    processor                                     update                | next update
    compute stream                                      parameters, to the device -->

Memory of the host that copies read or write is page-locked on CUDA devices, since only then a copy runs beside
anything. On the CPU a copy is a copy, done when the call returns: the same calls, in the same order.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx.log import get_logger, warn_once

_logger = get_logger(__name__)
_PAGE = 4096


class Staging:
    """The way to the host and back for tensors on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._sent: Any = None  # an event after the latest copy to the device

    @contextlib.contextmanager
    def beside(self, wait: Callable[[], object] | None = None) -> Iterator[None]:
        """What is queued in here runs beside what is queued after it; after `wait`, or after all that is queued so far.

        `wait` orders the stream in which it is called, as the works of torch.distributed do on devices.
        """
        if self._stream is None:
            if wait is not None:
                wait()
            yield
            return
        if wait is None:
            self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            if wait is not None:
                wait()
            yield

    def to_host(self, host: Tensor, tensor: Tensor) -> Callable[[], object]:
        """Begin to copy `tensor` to `host`, inside `beside`; returns what waits until it is there.

        The tensor may be let go at once, and changed by whoever waits, or queues behind the copy.
        """
        host.copy_(tensor, non_blocking=True)
        if self._stream is None:
            return _nothing
        tensor.record_stream(self._stream)  # its memory is not used anew before the copy is done
        event: Any = self._stream.record_event()
        wait: Callable[[], object] = event.synchronize
        return wait

    def follow(self) -> None:
        """What is queued on the device from now on comes after the copies to the host that have begun."""
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)

    def to_device(self, tensors: Iterable[Tensor], host: Iterable[Tensor]) -> None:
        """Begin to copy to the device; what is queued there later sees it. The host's memory is read until `settle`."""
        for tensor, source in zip(tensors, host, strict=True):
            tensor.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._sent = torch.accelerator.current_stream(self.device).record_event()

    def settle(self) -> None:
        """Wait until all copies to the device have been made, so that the host's memory may be written."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

    def lock(self, memory: Tensor, ranges: Iterable[tuple[int, int]]) -> None:
        """Page-lock these ranges of bytes of `memory`, until it is let go. Without the right to, copies are slower.

        Cost: the pages exist from now on.
        """
        if self.device.type != "cuda":
            return
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for start, stop in plan_pages(memory.data_ptr(), ranges):
            status = cudart.cudaHostRegister(start, stop - start, 1)  # portable: for every device of this process
            if int(status) != 0:
                warn_once(_logger, f"offload: memory of the host can't be page-locked ({status}): copies take longer")
                return
            weakref.finalize(memory, _unlock, cudart, start).atexit = False  # CUDA may be gone by then


def _unlock(cudart: Any, address: int) -> None:
    cudart.cudaHostUnregister(address)


def _nothing() -> None:
    return None


def plan_pages(address: int, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The addresses of the whole pages around ranges of bytes from `address` on, neighbours made one: pure.

    A page can be locked once, and two ranges may touch the same.
    """
    pages: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        first = (address + start) // _PAGE * _PAGE
        last = -(-(address + stop) // _PAGE) * _PAGE
        if pages and first <= pages[-1][1]:
            pages[-1] = pages[-1][0], max(pages[-1][1], last)
        else:
            pages.append((first, last))
    return pages
