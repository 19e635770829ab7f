"""What tests/system/test_mpi_hosts.py runs in the ranks of an MPI job on several hosts."""

import os

import torch
import torch.distributed as dist
from tests.system.collective_checks import messages, moves, reductions

import phalanx


def everything():
    """All collectives and messages, in the group of all and in one across; nobody has said where to meet."""
    dist.init_process_group("mpi")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reductions(rank, world_size)
    moves(rank, world_size)
    messages(rank, world_size)
    tensor = torch.tensor([float(rank)])
    across = dist.new_group([1, 2])
    if rank in (1, 2):
        dist.all_reduce(tensor, group=across)
    beside = dist.new_group(backend="phalanx", pg_options=phalanx.Options(engine="mpi"))
    dist.all_reduce(total := torch.tensor([float(rank)]), group=beside)
    engines = [group.transport.engine.name for group in (dist.group.WORLD, beside)]
    dist.barrier()  # rank 0 keeps the store, and is no member of the last group
    dist.destroy_process_group()
    return {"engines": engines, "store": "MASTER_ADDR" in os.environ, "sums": (tensor.item(), total.item())}


def different():
    """Rank 3 calls something else; then rank 2 ends with an exception while the others wait for it."""
    job = phalanx.init()
    engine = "mpi" if job.rank == 0 else "gloo"
    words = ""
    try:
        dist.new_group(list(range(job.world_size)), pg_options=phalanx.Options(engine=engine))
    except ValueError as error:
        words = str(error)
    group = dist.new_group(list(range(job.world_size)), backend="mpi")
    try:
        dist.barrier(group) if job.rank == 3 else dist.all_reduce(torch.ones(3), group=group)
    except phalanx.MismatchError as error:
        words += f"\n{error}"
    print(f"rank {job.rank} heard: {words}", flush=True)
    dist.barrier()
    if job.rank == 2:
        raise KeyError("the loader's index")
    dist.barrier()
