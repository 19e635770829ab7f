"""oneCCL on host memory, through the C interface that `oneccl.cpp` puts in front of it (peers.py builds it)."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cases import ROOT, Case

from contestants.contract import BoundCall, Contestant, Options

LIBRARY = Path(sys.prefix) / "liboneccl_c.so"
_CONNECT_TIMEOUT_S = 60.0


class OneCclContestant:
    """A rank of one oneCCL communicator."""

    def __init__(self, library: ctypes.CDLL, max_count: int) -> None:
        self._library = library
        self._source, self._target = np.zeros(max_count, np.float32), np.zeros(max_count, np.float32)

    def bind(self, case: Case) -> BoundCall:
        source, target = self._source[: case.source_count], self._target[: case.target_count]
        if case.op == "broadcast":
            arguments = (_address(source), ctypes.c_size_t(case.source_count), ctypes.c_int(ROOT))
            return BoundCall(self._bound("broadcast", arguments), source, source)
        if case.op == "all_reduce":
            target = source  # the same work as torch.distributed's: in place
        count = case.source_count if case.op == "all_reduce" else case.block
        arguments = (_address(source), _address(target), ctypes.c_size_t(count))
        return BoundCall(self._bound(case.op, arguments), source, target)

    def barrier(self) -> None:
        _checked(self._library.barrier())

    def close(self) -> None:
        self._library.disconnect()

    def _bound(self, name: str, arguments: tuple[object, ...]) -> Callable[[], None]:
        function = getattr(self._library, name)

        def call() -> None:
            if function(*arguments):
                raise RuntimeError(f"oneCCL failed in {name}; its message is above")

        return call


def connect(rank: int, world_size: int, max_count: int, options: Options) -> Contestant:
    """Rank 0 leaves the address of its key-value store in the rendezvous folder; the others pick it up."""
    library = ctypes.CDLL(str(LIBRARY))
    library.address_bytes.restype = ctypes.c_size_t
    address = ctypes.create_string_buffer(library.address_bytes())
    place = Path(options.rendezvous_folder) / "oneccl-address"
    if rank == 0:
        _checked(library.create_address(address))
        place.with_suffix(".part").write_bytes(address.raw)
        os.replace(place.with_suffix(".part"), place)
    else:
        address.raw = _wait_for(place)
    _checked(library.connect(rank, world_size, address))
    return OneCclContestant(library, max_count)


def _wait_for(place: Path) -> bytes:
    give_up = time.monotonic() + _CONNECT_TIMEOUT_S
    while not place.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"rank 0 left no oneCCL address within {_CONNECT_TIMEOUT_S:.0f} s")
        time.sleep(0.01)
    return place.read_bytes()


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _checked(status: int) -> None:
    if status:
        raise RuntimeError("oneCCL failed; its message is above")
