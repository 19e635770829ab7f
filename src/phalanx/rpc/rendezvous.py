"""Let the workers of a job meet in the job's store, under keys of this start of rpc alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from phalanx._base.deadline import Deadline
from phalanx._base.torch_names import find
from phalanx._comm.backend.init_file import check_init_file
from phalanx._comm.backend.rendezvous import agents_key, launched_rendezvous, own_address
from phalanx._comm.control.key import Key
from phalanx._comm.control.key_file import find_key
from phalanx._comm.engines.gloo import local_address
from phalanx._comm.rendezvous.launchers import find_agents_store, find_launch
from phalanx._comm.rendezvous.torch_store import base_of

_make_store: Any = find(
    "torch.distributed.rendezvous._create_store_from_options",
    loses="phalanx.rpc.init_rpc does not work without world_size",
)

_kept: list[Any] = []  # torch's handlers must not be ended: some keep the store
_starts: dict[str, int] = {}


def find_place(rank: int, world_size: int | None) -> tuple[int, int | None]:
    """Return rank and world size: as given, else as the launcher says; the rank is -1 if nobody knows it.

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
    """Return the job's store; in a job of fixed size, each start of rpc in this process has keys of its own."""
    handler = _addresses(init_method, rank, world_size, timeout)
    store, _, _ = next(handler)
    _kept.append(handler)
    store.set_timeout(timeout)
    if world_size is None:  # a worker that comes again, in this process or another, comes to the same workers
        return PrefixStore("phalanx-rpc", store)
    number = _starts[init_method] = _starts.get(init_method, -1) + 1
    return PrefixStore(f"phalanx-rpc-{number}", store)


def _addresses(init_method: str, rank: int, world_size: int | None, timeout: timedelta) -> Iterator[Any]:
    if init_method.startswith("env://") and find_agents_store(os.environ):
        # this works whether or not torch was patched for it
        return launched_rendezvous(rendezvous, init_method, timeout)
    if init_method.startswith("file://"):
        check_init_file(init_method, Deadline.after(timeout))
    if world_size is None:
        return iter([(_make_store(SimpleNamespace(init_method=init_method), rank), rank, -1)])
    addresses: Iterator[Any] = rendezvous(init_method, rank, world_size, timeout=timeout)
    return addresses


def is_on_network(store: Any) -> bool:
    """Return whether workers of other hosts may meet in the store."""
    return bool(getattr(base_of(store), "host", ""))


def network_address(store: Any) -> str:
    """Return the address at which other hosts reach this one: the agents' tried one, or that on the store's way."""
    if told := own_address():
        return told
    host = getattr(base_of(store), "host", "")
    return local_address(host) if host else "127.0.0.1"


def job_key() -> Key | None:
    """Return the job's key: of the agent of `phalanx run`, or the user's own."""
    return agents_key() or find_key()


def may_be_public() -> bool:
    """Return whether the user says that a public address is behind a firewall."""
    return os.environ.get("PHALANX_ALLOW_PUBLIC_ADDRESS") == "1"
