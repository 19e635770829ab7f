"""Run in the ranks of an MPI job on one host, for tests/backend/test_mpi.py."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.mpi_jobs import leave_result
from tests.system.collective_checks import messages, moves, reductions
from tests.transport import contract

import phalanx
from phalanx._base.deadline import Deadline
from phalanx._comm.backend import PhalanxProcessGroup, create
from phalanx._comm.backend.connect import start_mpi_together


def raised(call):
    """The name and the words of what `call` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def join():
    dist.init_process_group("mpi", timeout=timedelta(seconds=60))
    return dist.get_rank(), dist.get_world_size()


def join_as_two_hosts():
    """Join as if the last rank were on a host of its own: MPI carries what goes there and comes from there."""
    rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    size = int(os.environ.get("PMI_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
    if rank == size - 1:
        create.host_identity = lambda: "another host"
    return join()


def a_sum_and_a_message():
    """Both of the below in one job: starting one takes longer than any of it."""
    seen = on_one_host(wrapper=phalanx.DistributedDataParallel)
    return seen, on_two_hosts(_a_sum_and_a_message)


def everything():
    """The same, with every collective and message between hosts."""
    seen = on_one_host()
    return seen, on_two_hosts(_every_call)


def on_one_host(wrapper=torch.nn.parallel.DistributedDataParallel):
    """All that the backend's name makes of a job on one host."""
    rank, _ = join()
    group = dist.group.WORLD
    seen = {
        "names": (dist.get_backend(), dist.is_mpi_available(), isinstance(group, PhalanxProcessGroup)),
        "memory": (group.shares_memory, dist.new_group().shares_memory),
        "mpi": "mpi4py.MPI" in sys.modules,
        "joined": raised(lambda: dist.new_group(backend="cpu:mpi,cuda:nccl")),
        "local": raised(lambda: dist.new_group([rank], backend="mpi", use_local_synchronization=True)),
        "options": raised(lambda: dist.new_group(backend="mpi", pg_options=object())),
    }
    model = wrapper(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), float(rank))).sum().backward()
    seen["ddp"] = model.module.weight.grad[0, 0].item()
    dist.destroy_process_group()
    seen["again"] = join()
    with phalanx.init() as job:  # finds the group that is there
        seen["init"] = (job.rank, job.world_size)
    return seen


def _a_sum_and_a_message(rank, world_size):
    tensor = torch.full((50_000,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(world_size))] * 50_000
    if rank == 0:
        dist.send(tensor, dst=world_size - 1)
    elif rank == world_size - 1:
        received = torch.empty_like(tensor)
        dist.recv(received, src=0)
        assert torch.equal(received, tensor)


def _every_call(rank, world_size):
    reductions(rank, world_size)
    moves(rank, world_size)
    messages(rank, world_size)


def on_two_hosts(call):
    """`call(rank, world_size)` in the group of all ranks, then one broadcast in a group of two."""
    rank, world_size = join_as_two_hosts()
    call(rank, world_size)
    first, last = 0, world_size - 1
    pair = dist.new_group([first, last])
    tensor = torch.tensor([float(rank)])
    if rank in (first, last):
        dist.broadcast(tensor, src=last, group=pair)
    for _ in range(20):
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)
    engine = dist.group.WORLD.transport.engine.name
    dist.destroy_process_group()
    return dist.get_backend() if dist.is_initialized() else engine, tensor.item()


def whole_contract():
    """What every transport promises."""
    return contract.whole_contract(*join_as_two_hosts())


def exits():
    """Rank 1 ends by itself; the others wait for it."""
    rank, _ = join_as_two_hosts()
    dist.barrier()
    if rank == 1:
        sys.exit(3)
    heard = raised(lambda: dist.all_reduce(torch.ones(1)))
    leave_result(heard)  # not printed: MPICH's mpiexec may end the job before it has read what its ranks printed
    sys.exit(4)


def killed():
    """Rank 1 is killed; the launcher ends the job."""
    rank, _ = join_as_two_hosts()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def start_mpi():
    """What a group of these ranks says when it starts MPI, as it does once they are on several hosts."""
    if not dist.is_initialized():
        dist.init_process_group("phalanx")
    store = dist.distributed_c10d._get_default_store()
    return raised(lambda: start_mpi_together(store, dist.get_rank(), dist.get_world_size(), "0", Deadline.after(60)))
