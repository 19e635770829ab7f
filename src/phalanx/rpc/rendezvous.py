"""Where the workers of a job meet: the job's store, under keys of this start of rpc alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import _create_store_from_options, rendezvous

from phalanx.backend.rendezvous import launched_rendezvous
from phalanx.coordination.launchers import find_agents_store, find_launch

_kept: list[Any] = []  # torch's handlers must not be ended: some keep the store
_starts: dict[str, int] = {}


def find_place(rank: int, world_size: int | None) -> tuple[int, int | None]:
    """Rank and world size: as given, else as the launcher says; the rank is -1 where nobody knows.

    `world_size` stays None for a worker that joins a job of no fixed size: then its rank has to be given.
    """
    if rank >= 0:
        return rank, world_size
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) if world_size is None else world_size
    launch = find_launch(os.environ)
    if launch is not None:
        return launch.rank, launch.world_size if world_size is None else world_size
    return -1, world_size


def open_store(init_method: str, rank: int, world_size: int | None, timeout: timedelta) -> Any:
    """The job's store; each start of rpc in this process has keys of its own."""
    handler = _addresses(init_method, rank, world_size, timeout)
    store, _, _ = next(handler)
    _kept.append(handler)
    store.set_timeout(timeout)
    number = _starts[init_method] = _starts.get(init_method, -1) + 1
    return PrefixStore(f"phalanx-rpc-{number}", store)


def _addresses(init_method: str, rank: int, world_size: int | None, timeout: timedelta) -> Iterator[Any]:
    if init_method.startswith("env://") and find_agents_store(os.environ):
        return launched_rendezvous(rendezvous, init_method, timeout)  # whether or not torch was patched for it
    if world_size is None:
        make: Any = _create_store_from_options
        return iter([(make(SimpleNamespace(init_method=init_method), rank), rank, -1)])
    addresses: Iterator[Any] = rendezvous(init_method, rank, world_size, timeout=timeout)
    return addresses
