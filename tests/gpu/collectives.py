"""Every collective once, on any device and dtype: the same program gives the same numbers everywhere."""

import torch
import torch.distributed as dist

# What a group of this PyTorch calls them: torch 2.12 gave them new names.
_OLD = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
SINGLE = {name: name if hasattr(dist.ProcessGroup, name) else old for name, old in _OLD.items()}


def all_collectives(device, dtype, rank, world_size):
    """What this rank's tensors hold after each, as lists; small whole numbers, so that dtypes agree."""
    group = dist.group.WORLD
    results = []

    def mine(n=2):
        return (torch.arange(n) + 10 * rank).to(device, dtype)

    def zeros(n=2):
        return torch.zeros(n, device=device, dtype=dtype)

    def each(n=2):
        return [zeros(n) for _ in range(world_size)]

    def keep(*tensors):
        results.extend(t.cpu().tolist() for t in tensors)

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        dist.all_reduce(tensor := mine(), op=op)
        keep(tensor)
    dist.all_reduce(tensor := mine(), async_op=True).wait()
    keep(tensor)
    future = dist.all_reduce(mine(), async_op=True).get_future()
    keep(future.then(lambda done: done.value()[0] * 2).wait())
    dist.all_reduce(tensor := mine(6).view(2, 3).t())  # its elements do not lie in order
    keep(tensor)
    dist.all_reduce(tensor := mine(1)[0])
    dist.all_reduce(zeros(0))
    keep(tensor)
    last = world_size - 1
    dist.broadcast(tensor := mine(), src=last)
    keep(tensor)
    dist.reduce(tensor := mine(), dst=0)
    keep(*[tensor] if rank == 0 else [])
    dist.all_gather(outputs := each(), mine())
    keep(*outputs)
    single = getattr(group, SINGLE["all_gather_single"])
    single(output := zeros(2 * world_size), mine()).wait()
    keep(output)
    dist.gather(mine(), outputs := each() if rank == 0 else None, dst=0)
    keep(*outputs or [])
    dist.scatter(output := zeros(), [mine() + r for r in range(world_size)] if rank == last else None, src=last)
    keep(output)
    dist.reduce_scatter(output := zeros(), [mine() + r for r in range(world_size)])
    keep(output)
    single = getattr(group, SINGLE["reduce_scatter_single"])
    single(output := zeros(), mine(2 * world_size)).wait()
    keep(output)
    dist.all_to_all_single(output := zeros(2 * world_size), mine(2 * world_size))
    keep(output)
    splits = [r + 1 for r in range(world_size)]
    dist.all_to_all_single(output := zeros(world_size * (rank + 1)), mine(sum(splits)), [rank + 1] * world_size, splits)
    keep(output)
    dist.all_to_all(outputs := each(), [mine() + r for r in range(world_size)])
    keep(*outputs)
    if world_size > 1:
        if rank == 0:
            dist.send(mine(), 1)
        elif rank == 1:
            dist.recv(tensor := zeros(), 0)
            keep(tensor)
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        ops = [dist.P2POp(dist.isend, mine(3), after), dist.P2POp(dist.irecv, tensor := zeros(3), before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        keep(tensor)
    dist.barrier()
    return results
