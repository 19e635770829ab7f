"""Let the ranks of a host map each other's device memory: each makes an area and hands it to the others.

    all       make an area; tell whether that went well, and where to fetch it
    rank 0    hands its descriptor to the others; then rank 1, ...
    all       map what they have fetched; tell whether that went well

If one rank cannot do this, no rank does: its device may not reach the others, or its driver may not share memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch

from phalanx.deadline import Deadline
from phalanx.engines.device_memory import DeviceMemory, MappedMemory
from phalanx.ipc.local_listener import LocalAddress, new_token
from phalanx.log import get_logger
from phalanx.symmetric_memory.fd_server import FdServer, receive_fds
from phalanx.transport.device_memory import AREA_BYTES, Areas

_ADDRESS_BYTES = 128
_WORD_BYTES = 8

_logger = get_logger(__name__)


def open_areas(
    tell_all: Callable[[bytes, int], list[bytes]],
    rank: int,
    device: torch.device,
    memory: DeviceMemory,
    deadline: Deadline,
    area_bytes: int = AREA_BYTES,
) -> Areas | None:
    """Return all ranks' areas on their devices, mapped here; return None on all ranks if one of them cannot. All ranks
    call it.

    `tell_all(words, nbytes)` returns what each rank tells.

    Raises:
        PhalanxError: a rank is lost, or late.
    """
    with contextlib.ExitStack() as stack:
        own: MappedMemory | None = None
        address = b""
        try:
            fd, own = memory.create(device, area_bytes)
            stack.callback(os.close, fd)
            server = stack.enter_context(FdServer(new_token()))
            address = str(server.address).encode()
        except OSError as error:
            _logger.debug("memory on %s is not shared: %s", device, error)
        addresses = tell_all(address, _ADDRESS_BYTES)
        mapped: list[MappedMemory | None] = [None] * len(addresses)
        mapped[rank] = own
        if all(addresses):
            for owner, theirs in enumerate(addresses):
                if owner == rank:
                    others = [r for r in range(len(addresses)) if r != rank]
                    server.serve(others, [fd], deadline, lambda missing: None)
                else:
                    mapped[owner] = _fetch(theirs.decode(), rank, device, memory, deadline, area_bytes)
        pieces = [piece for piece in mapped if piece is not None]
        everywhere = tell_all(b"mapped" if len(pieces) == len(mapped) else b"", _WORD_BYTES)
        if all(everywhere):
            return Areas(rank, pieces, area_bytes)
        for piece in pieces:
            piece.close()
        return None


def _fetch(
    address: str, rank: int, device: torch.device, memory: DeviceMemory, deadline: Deadline, area_bytes: int
) -> MappedMemory | None:
    (fd,) = receive_fds(LocalAddress.parse(address), rank, 1, deadline)
    try:
        return memory.open(fd, device, area_bytes)
    except OSError as error:
        _logger.debug("another rank's memory is not mapped on %s: %s", device, error)
        return None
    finally:
        os.close(fd)
