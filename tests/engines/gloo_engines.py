"""Engines of Gloo, as ranks make them."""

from datetime import timedelta

import torch.distributed as dist

from phalanx._comm.engines.gloo import GlooEngine

WAIT = timedelta(seconds=20)


def engine_of(rank, world_size, name="engine"):
    store = dist.PrefixStore(name, dist.group.WORLD.get_group_store())
    engine = GlooEngine(store, rank, world_size, WAIT, address="127.0.0.1")
    # A rank may close its engine at once, while another is still connecting to it, and that one's start fails.
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{r}" for r in range(world_size)], WAIT)
    return engine
