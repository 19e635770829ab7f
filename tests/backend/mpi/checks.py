"""What tests/backend/mpi runs in the ranks of an MPI job."""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.conformance.torch_suite import TorchSuite
from tests.mpi_jobs import leave_result
from tests.system.collective_checks import messages, moves, reductions

import phalanx
from phalanx.backend.process_group import PhalanxProcessGroup


def raised(call):
    """The name and the words of what `call` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def join(timeout_s=60.0):
    dist.init_process_group("mpi", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def everything():
    """All that can go on in one job: starting one takes longer than any of it."""
    rank, world_size = join()
    group = dist.group.WORLD
    seen = {
        "names": (dist.get_backend(), group.name(), dist.is_mpi_available(), isinstance(group, PhalanxProcessGroup))
    }
    reductions(rank, world_size)
    moves(rank, world_size)
    messages(rank, world_size)
    seen["beside gloo"] = beside_gloo(rank, world_size)
    seen["async"] = in_flight(rank, world_size)
    seen["errors"] = {
        "device": raised(lambda: dist.all_reduce(torch.empty(1, device="meta"))),
        "tag": raised(lambda: dist.send(torch.empty(1), (rank + 1) % world_size, tag=2**31 - 1)),
        "joined": raised(lambda: dist.new_group(backend="cpu:mpi,cuda:nccl")),
        "local": raised(lambda: dist.new_group([rank], backend="mpi", use_local_synchronization=True)),
    }
    seen["sub-groups"] = sub_groups(rank, world_size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), float(rank))).sum().backward()
    seen["ddp"] = model.module.weight.grad[0, 0].item()
    dist.destroy_process_group()
    seen["again"] = join()
    with phalanx.init() as job:  # finds the group that is there
        seen["init"] = (job.rank, job.world_size)
    return seen


def beside_gloo(rank, world_size):
    """Names of what Gloo answers otherwise: every dtype and reduction that both know, contiguous or not."""
    gloo = dist.new_group(backend="gloo")
    dtypes = [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.int8,
    ]
    different = []
    for dtype in dtypes:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND):
            if op == dist.ReduceOp.BAND and dtype.is_floating_point:
                continue
            generator = torch.Generator().manual_seed(rank)
            mine = torch.randint(1, 4, (5, 7), generator=generator).to(dtype)
            for ours, theirs in ((mine.clone(), mine.clone()), (mine.clone().t(), mine.clone().t().contiguous())):
                dist.all_reduce(ours, op=op)
                dist.all_reduce(theirs, op=op, group=gloo)
                if not torch.equal(ours, theirs):
                    different.append(f"{op} of {dtype}")
    flags = [torch.tensor([r == 0, True, False]) for r in range(world_size)]
    for op, combine in ((dist.ReduceOp.SUM, torch.any), (dist.ReduceOp.PRODUCT, torch.all)):
        got = flags[rank].clone()
        dist.all_reduce(got, op=op)
        if not torch.equal(got, combine(torch.stack(flags), dim=0)):
            different.append(f"{op} of bool")
    waves = torch.tensor([1 + 2j * rank])
    dist.all_reduce(waves)
    if waves.item() != world_size + 1j * world_size * (world_size - 1):
        different.append("complex")
    return different


def in_flight(rank, world_size):
    """Asynchronous operations end in order, and futures carry their tensors."""
    works = [dist.all_reduce(torch.full((3,), float(i)), async_op=True) for i in range(5)]
    futures = [work.get_future() for work in works]
    sums = [future.wait()[0][0].item() for future in futures]
    if rank == 0:
        got = [torch.empty(1), torch.empty(1)]
        pending = [dist.irecv(got[0], 1, tag=1), dist.irecv(got[1], 1, tag=2)]
        pending[1].wait()  # the later one first: tags do not wait for each other
        dist.send(torch.zeros(1), 1, tag=3)
        pending[0].wait(timedelta(seconds=20))
        assert (pending[0].is_completed(), pending[0].source_rank()) == (True, 1)
        first = dist.irecv(got[0], 1, tag=4).get_future().wait()
        return [*sums, got[1].item(), first[0].item()]
    if rank == 1:
        dist.send(torch.tensor([2.0]), 0, tag=2)
        dist.recv(torch.empty(1), 0, tag=3)
        dist.send(torch.tensor([1.0]), 0, tag=1)
        dist.send(torch.tensor([4.0]), 0, tag=4)
    return sums


def sub_groups(rank, world_size):
    """A group without rank 1, counted backwards; one of another backend; and many, one after the other."""
    pair = dist.new_group([0, 2])
    tensor = torch.tensor([float(rank)])
    if rank != 1:
        dist.broadcast(tensor, src=2, group=pair)
    mixed = dist.new_group(backend="phalanx")
    total = torch.ones(1)
    dist.all_reduce(total, group=mixed)
    for _ in range(20):
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)
    return tensor.item(), total.item(), mixed.shares_memory


def texts():
    """What goes wrong in a group of its own, and what every rank hears."""
    rank, _ = join(20.0)
    seen = {}
    group = dist.new_group()
    seen["mismatch"] = raised(lambda: dist.barrier(group) if rank == 2 else dist.all_reduce(torch.ones(2), group=group))
    seen["over"] = raised(lambda: dist.barrier(group))
    group = dist.new_group()
    sizes = [1, 1, 2] if rank == 0 else [1, 1, 1]
    seen["sizes"] = raised(
        lambda: dist.all_to_all_single(torch.empty(3), torch.ones(sum(sizes)), [1, 1, 1], sizes, group=group)
    )
    group = dist.new_group()
    message = torch.empty(3) if rank == 1 else torch.ones(4)
    if rank < 2:
        seen["message"] = raised(lambda: (dist.recv if rank else dist.send)(message, 1 - rank, group=group))
    group = dist.new_group()
    group.set_timeout(timedelta(seconds=0.3))  # for what is to fail, not for what leads to it
    if rank == 1:
        dist.barrier()
        seen["late"] = raised(lambda: dist.all_reduce(torch.ones(2), group=group))
    else:
        seen["late"] = raised(lambda: dist.all_reduce(torch.ones(2), group=group))
        dist.barrier()
    group = dist.new_group()
    if rank == 0:
        dist.destroy_process_group(group)
    else:
        seen["left"] = raised(lambda: dist.all_reduce(torch.ones(2), group=group))
    group = dist.new_group()
    if rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGALRM)).start()
        try:
            dist.barrier(group)
        except KeyboardInterrupt:
            seen["interrupted"] = "KeyboardInterrupt"
    elif rank == 2:
        seen["interrupted"] = raised(lambda: dist.barrier(group))
    dist.barrier()
    return seen


def exits():
    """Rank 1 ends by itself; the others wait for it."""
    rank, _ = join()
    dist.barrier()
    if rank == 1:
        sys.exit(3)
    heard = raised(lambda: dist.all_reduce(torch.ones(1)))
    leave_result(heard)  # not printed: MPICH's mpiexec may end the job before it has read what its ranks printed
    sys.exit(4)


def killed():
    """Rank 1 is killed; the launcher ends the job."""
    rank, _ = join()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def joins():
    """What init_process_group says, whatever it is."""
    return raised(join)


def conformance():
    """PyTorch's own tests, one after the other, over backend "mpi"; what each rank says of each."""
    folder, names = os.environ["CONFORMANCE_FOLDER"], os.environ["CONFORMANCE_TESTS"].split()
    rank, world_size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    suite = TorchSuite("mpi", world_size)
    suite._module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.remove("mpi")  # messages over MPI are not seen by the profiler
    said = {}
    for name in names:
        said[name] = raised(lambda n=name: suite._on_rank(rank, world_size, n, f"{folder}/{n}"))
        if dist.is_initialized():
            dist.destroy_process_group()
    return said
