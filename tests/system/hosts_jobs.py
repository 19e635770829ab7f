"""Jobs on real hosts for the tests: network namespaces joined by a switch, with the ranks as processes inside them."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from phalanx.testing import hosts, run_ranks


def on_hosts(sizes, fn, *args, timeout_s=30.0, lost=(), run_s=60.0, options=None, network="10.77.0", rate=None):
    """Call fn(rank, world_size, hosts, *args) on as many ranks as `sizes` says of each host, in one group over all."""
    owner = [host for host, size in enumerate(sizes) for _ in range(size)]

    def rank_main(rank, world_size, machines):
        machines[owner[rank]].enter()
        dist.init_process_group(
            "phalanx",
            init_method=f"tcp://{machines[0].address}:29511",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            pg_options=options[rank] if isinstance(options, list) else options,
        )
        try:
            return fn(rank, world_size, machines, *args)
        finally:
            dist.destroy_process_group()

    with hosts(len(sizes), network=network, rate=rate) as machines:
        return run_ranks(rank_main, len(owner), machines, init=False, lost=lost, timeout=run_s)


def limit(timeout_s):
    """From here on operations may take so long: for what is to fail, not for what leads to it on a busy machine."""
    dist.group.WORLD.set_timeout(timedelta(seconds=timeout_s))
