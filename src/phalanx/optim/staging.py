"""Copy tensors between a device and host memory, while the CPU updates other tensors.

    copy stream      gradients of wave 0, to the host | wave 1 | wave 2 | ...
    CPU                                                 update 0 | update 1 | ...
    compute stream                                                 parameters of wave 0, to the device | ...

The host side of the copies is page-locked for CUDA devices, since only then is a copy asynchronous. If `device` is the
CPU, a copy is complete when the call returns. If the two sides differ in precision, the device converts: the conversion
overlaps the CPU's update, and takes less time than the copy.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._base.log import get_logger, warn_once
from phalanx._comm.transport.staging.host_memory import FOR_ALL_DEVICES, lock_pages, unlock_pages
from phalanx.optim.shared_parameters import PAGE, whole_pages

_logger = get_logger(__name__)

# Tensors are converted in pieces of this many elements, to limit the temporary memory on the device.
_CONVERTED_AT_ONCE = 8 << 20


class HostStaging:
    """A `HostStaging` copies tensors on `device` to the host and back.

    takes_checksums   detect writes to tensors by checksums on the device, instead of reading them on the host
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.takes_checksums = device.type != "cpu"
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._sent: Any = None  # the event of the latest copy to the device

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Run work queued inside the block after all work queued so far, but concurrently with work queued later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            yield

    def to_host(self, host: Tensor, tensor: Tensor) -> Callable[[], object]:
        """Start copying `tensor` to `host`, inside `beside`; return a function that waits for the copy.

        Both tensors have one dimension. `tensor` may be freed at once; code that changes it must wait for the copy, or
        be queued after the copy.
        """
        if self._stream is None:
            host.copy_(tensor)
            return _nothing
        for there, here in _in_pieces(host, tensor):
            there.copy_(here.to(there.dtype), non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not reused before the copy is complete
        event: Any = self._stream.record_event()
        wait: Callable[[], object] = event.synchronize
        return wait

    def follow(self) -> None:
        """Make later work on the device wait for the copies to the host that have begun."""
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)

    def to_device(self, tensors: Iterable[Tensor], host: Iterable[Tensor]) -> None:
        """Start copying `host` to `tensors`, ahead of work queued later; leave `host` unchanged until `synchronize`."""
        for tensor, source in zip(tensors, host, strict=True):
            if self._stream is None or tensor.dtype == source.dtype:
                tensor.copy_(source, non_blocking=True)
                continue
            for here, there in _in_pieces(_flat(tensor), _flat(source)):
                here.copy_(there.to(self.device, non_blocking=True))
        self.queue_after_copies(_nothing)

    def queue_after_copies(self, then: Callable[[], object]) -> None:
        """Call `then`, which queues work behind the copies to the device; a subclass may wait until `synchronize`."""
        then()
        if self._stream is not None:
            self._sent = torch.accelerator.current_stream(self.device).record_event()

    def synchronize(self) -> None:
        """Wait for all copies to the device, and the work after them; afterwards the host memory may be written."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

    def note(self, flats: Sequence[Tensor], host: Sequence[Tensor]) -> Any:
        """Return a note for `differ`, which detects writes to `flats`, one-dimensional tensors, by any code.

        On the CPU the note is `host`, with the same or more precise values, which must not change before `differ`.
        Otherwise the note is a checksum, queued on the device before any later work.
        """
        return checksum(flats) if self.takes_checksums else host

    def differ(self, noted: Sequence[tuple[Sequence[Tensor], Any]]) -> list[bool]:
        """Return for each of these groups of tensors whether its bits differ from its note.

        This waits for the device, once; no other stream may still be computing a note.
        """
        if not self.takes_checksums:
            return [not all(map(_same_bits, flats, note)) for flats, note in noted]
        differ = [(checksum(flats) != note).any() for flats, note in noted]
        return torch.stack(differ).tolist() if differ else []

    @property
    def locks(self) -> bool:
        """Return whether host memory must be page-locked for this device."""
        return self.device.type == "cuda"

    def empty_host(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return host memory to copy to: page-locked if needed, in pages of its own."""
        nbytes = count * dtype.itemsize
        if not self.locks or nbytes == 0:
            return torch.empty(count, dtype=dtype, device="cpu")
        memory = torch.empty(whole_pages(nbytes) + PAGE, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % PAGE
        host = memory[start : start + nbytes].view(dtype)
        lock(host, [(0, nbytes)])
        return host


def _same_bits(tensor: Tensor, host: Tensor) -> bool:
    """Return whether a copy of `host` to `tensor` would change no bit."""
    return torch.equal(tensor.detach().view(torch.uint8), host.detach().to(tensor.dtype).view(torch.uint8))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _in_pieces(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield matching pieces of both tensors; all at once if they have the same precision."""
    if one.dtype == other.dtype:
        yield one, other
    else:
        for start in range(0, one.numel(), _CONVERTED_AT_ONCE):
            piece = slice(start, start + _CONVERTED_AT_ONCE)
            yield one[piece], other[piece]


def lock(memory: Tensor, ranges: Iterable[tuple[int, int]]) -> None:
    """Page-lock these byte ranges of `memory` until it is freed. If locking fails, warn: copies are slower.

    A page can be locked only once: call this once for all ranges of a block, which must share no page with another.
    Cost: the pages become resident.
    """
    for start, stop in plan_pages(memory.data_ptr(), ranges):
        if error := lock_pages(start, stop - start, FOR_ALL_DEVICES):
            warn_once(
                _logger, f"offload: host memory could not be page-locked (CUDA error {error}), so copies are slower"
            )
            return
        weakref.finalize(memory, unlock_pages, start).atexit = False  # CUDA may have ended by then


def _nothing() -> None:
    return None


def plan_pages(address: int, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the address ranges of the whole pages that byte ranges from `address` touch, with neighbours merged.

    A page can be locked only once, and two ranges may touch the same page.
    """
    pages: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        first = (address + start) // PAGE * PAGE
        last = -(-(address + stop) // PAGE) * PAGE
        if pages and first <= pages[-1][1]:
            pages[-1] = pages[-1][0], max(pages[-1][1], last)
        else:
            pages.append((first, last))
    return pages


# Compute a checksum of tensors' bits on their own device, to detect unreported writes.
#
# PyTorch counts the writes that autograd should know of (`_version`). Collectives, the unscaling of a GradScaler,
# writes through `.data` and kernels of extensions change memory without counting.

_BLOCK = 1 << 16
_BLOCKS_AT_ONCE = 64  # so that the products take 32 MB
# Elements are read as integers of at most 4 bytes: scaling by a power of two adds the same number to each, and in an
# exact sum of 8-byte elements that change could be lost above 64 bits.
_WORDS = {1: torch.int8, 2: torch.int16}


def checksum(flats: Sequence[Tensor]) -> Tensor:
    """Return sums of the bits of `flats`, contiguous tensors of one dimension, as int64 on their device.

    There are two sums for each width of element, over the concatenated tensors of that width. The first is exact, so
    that scaling by a power of two changes it, unless all values are zero, infinite or NaN. The second is over 8-byte
    words, each with an odd factor for its position: a change of one word always changes the sum; a change of signs or
    of the order almost always does.

    Shape: (two for each width).
    Cost: a dozen kernels, which read the tensors twice, and a copy if there are several tensors; 32 MB on the device.
    """
    sums: list[Tensor] = []
    for width in sorted({flat.element_size() for flat in flats}):
        words = [flat.detach().view(_WORDS.get(width, torch.int32)) for flat in flats if flat.element_size() == width]
        together = words[0] if len(words) == 1 else torch.cat(words)
        sums += together.sum(dtype=torch.int64), _placed(together)
    return torch.stack(sums)


def _placed(words: Tensor) -> Tensor:
    """Return the sum of 8-byte words, each times a factor for its position: few products, and no conversion.

    Data that is not aligned to 8 bytes, such as the slice of a parameter, is summed element by element.
    """
    placed = torch.zeros((), dtype=torch.int64, device=words.device)
    width = words.element_size()
    is_aligned = words.data_ptr() % 8 == words.storage_offset() * width % 8 == 0
    count = words.numel() * width // 8 * 8 // width if is_aligned else 0
    parts = [words[:count].view(torch.int64), words[count:]] if is_aligned else [words]
    for some in parts:
        for start in range(0, some.numel(), _BLOCK * _BLOCKS_AT_ONCE):
            placed = placed * _FACTOR + _sum_of_blocks(some[start : start + _BLOCK * _BLOCKS_AT_ONCE])
    return placed


def _sum_of_blocks(some: Tensor) -> Tensor:
    factors = _factors(some.device)
    whole = some.numel() // _BLOCK
    rest = some[whole * _BLOCK :]
    sums = [(rest * factors[: rest.numel()]).sum()] if rest.numel() else []
    if whole:
        sums.append(((some[: whole * _BLOCK].view(whole, _BLOCK) * factors).sum(1) * factors[:whole]).sum())
    return sum(sums[1:], sums[0])


_FACTOR = 0x2545F4914F6CDD1D  # odd, so that no bit is lost modulo 2^64


@functools.lru_cache(maxsize=32)
def _factors(device: torch.device) -> Tensor:
    """Return pseudo-random odd numbers, the same in every call."""
    numbers = torch.randint(-(1 << 62), 1 << 62, (_BLOCK,), generator=torch.Generator().manual_seed(1), device="cpu")
    return (2 * numbers + 1).to(device)
