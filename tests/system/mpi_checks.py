"""What tests/system/test_mpi_hosts.py runs in the ranks of an MPI job on several hosts."""

import os

import torch
import torch.distributed as dist
from tests.system.collective_checks import messages, moves, reductions

import phalanx


def everything():
    """All collectives and messages, in the group of all and in one across; nobody has said where to meet."""
    dist.init_process_group("phalanx", pg_options=phalanx.Options(engine="mpi"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reductions(rank, world_size)
    moves(rank, world_size)
    messages(rank, world_size)
    across = dist.new_group([1, 2], pg_options=phalanx.Options(engine="mpi"))
    tensor = torch.tensor([float(rank)])
    if rank in (1, 2):
        dist.all_reduce(tensor, group=across)
    memory = dist.group.WORLD.transport
    dist.barrier()  # rank 0 keeps the store, and is no member of the last group
    dist.destroy_process_group()
    return {"engine": memory._engine.name, "store": "MASTER_ADDR" in os.environ, "across": tensor.item()}


def different():
    """Rank 3 calls something else; then rank 2 ends with an exception while the others wait for it."""
    job = phalanx.init()
    engine = "mpi" if job.rank == 0 else "gloo"
    words = ""
    try:
        dist.new_group(list(range(job.world_size)), pg_options=phalanx.Options(engine=engine))
    except ValueError as error:
        words = str(error)
    group = dist.new_group(list(range(job.world_size)), pg_options=phalanx.Options(engine="mpi"))
    try:
        dist.barrier(group) if job.rank == 3 else dist.all_reduce(torch.ones(3), group=group)
    except phalanx.MismatchError as error:
        words += f"\n{error}"
    print(f"rank {job.rank} heard: {words}", flush=True)
    dist.barrier()
    if job.rank == 2:
        raise KeyError("the loader's index")
    dist.barrier()


def pickles():
    """Objects in the group of all, which spans hosts, and in one of a host; then rank 0 sends one without the key."""
    dist.init_process_group("mpi")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([0, 1, 2, 3])
    for _ in range(3):
        found = [None] * world_size
        dist.all_gather_object(found, {"rank": rank}, group=group)
        assert found == [{"rank": r} for r in range(world_size)]
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    assert mine.transport.pickles is None, "its ranks are on one host"
    dist.broadcast_object_list([rank], group=mine, group_src=0)
    key, refused = group.transport.pickles.key.hex(), ""
    assert key != dist.group.WORLD.transport.pickles.key.hex()
    if rank == 0:
        group.transport.pickles.key = bytes(32)
    try:
        dist.broadcast_object_list([rank], src=0, group=group)
    except phalanx.PhalanxError as error:
        refused = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return key, refused
