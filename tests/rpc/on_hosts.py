"""Workers on several hosts: network namespaces."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from phalanx import rpc
from phalanx._comm.control.key import Key
from phalanx.errors import PeerLostError
from phalanx.testing import hosts, run_ranks
from phalanx.testing.namespaces import Host

_machines: list[Host] = []
_KEY = str(Key.generate())


def on_hosts(
    sizes: list[int], fn: Callable[..., Any], *args: Any, key: str = _KEY, lost: Any = (), joining: bool = False
) -> list[Any]:
    """`fn(rank, *args)` as a worker of the host it is on; if `joining`, `fn(rank, options)`, which makes the worker."""
    owner = [host for host, size in enumerate(sizes) for _ in range(size)]

    def main(rank: int, world_size: int, machines: Any) -> Any:
        machines[owner[rank]].enter()
        _machines[:] = machines
        os.environ.pop("PHALANX_KEY_FILE", None)
        os.environ.update(PHALANX_KEY=key, HOME="/nonexistent")
        options = rpc.RpcBackendOptions(init_method=f"tcp://{machines[0].address}:29513")
        if joining:
            return fn(rank, options, *args)
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
        try:
            result = fn(rank, *args)
        except BaseException:
            rpc.shutdown(graceful=False)
            raise
        if lost:
            with pytest.raises(PeerLostError, match="rank 2"):
                rpc.shutdown()
        else:
            rpc.shutdown()
        return result

    with hosts(len(sizes), network="10.79.0") as machines:
        return run_ranks(main, len(owner), machines, init=False, lost=lost)
