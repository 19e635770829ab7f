"""Ranks of a benchmark that runs on several hosts: network namespaces of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from phalanx.testing import Host

_PORT = 29511


def join_on_host(rank: int, world_size: int, machines: Sequence[Host], per_host: int, timeout_s: float = 120.0) -> None:
    """Move this process to its host, of which each has `per_host` ranks, and make the default group over our backend.

    Groups over Gloo that are made later bind the host's own interface, and not what the machine's name resolves to.
    """
    machines[rank // per_host].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "phalanx",
        init_method=f"tcp://{machines[0].address}:{_PORT}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
