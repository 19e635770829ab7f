"""Each collective of torch.distributed once, and point to point: the values that their definitions give."""

import torch
import torch.distributed as dist

dist.init_process_group("phalanx")
rank, size = dist.get_rank(), dist.get_world_size()
ranks = range(size)


def mine(scale=1.0):
    return torch.arange(6, dtype=torch.float64) + 10 * scale * rank


def of(r, scale=1.0):
    return torch.arange(6, dtype=torch.float64) + 10 * scale * r


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


for op, combine in (
    (dist.ReduceOp.SUM, lambda all_: all_.sum(0)),
    (dist.ReduceOp.AVG, lambda all_: all_.sum(0) / size),
    (dist.ReduceOp.MAX, lambda all_: all_.amax(0)),
    (dist.ReduceOp.PRODUCT, lambda all_: all_.prod(0)),
):
    value = mine()
    dist.all_reduce(value, op=op)
    same(value, combine(torch.stack([of(r) for r in ranks])))
value = mine()
dist.broadcast(value, src=size - 1)
same(value, of(size - 1))
value = mine()
dist.reduce(value, dst=0)
if rank == 0:
    same(value, sum(of(r) for r in ranks))
gathered = [torch.empty(6, dtype=torch.float64) for _ in ranks]
dist.all_gather(gathered, mine())
same(gathered, [of(r) for r in ranks])
dist.gather(mine(), gathered if rank == 0 else None, dst=0)
if rank == 0:
    same(gathered, [of(r) for r in ranks])
value = torch.empty(6, dtype=torch.float64)
dist.scatter(value, [of(r, 3.0) for r in ranks] if rank == 0 else None, src=0)
same(value, of(rank, 3.0))
value = torch.empty(6, dtype=torch.float64)
dist.reduce_scatter_tensor(value, torch.cat([mine() + 100 * r for r in ranks]))
same(value, sum(of(r) + 100 * rank for r in ranks))
value = torch.empty(6 * size, dtype=torch.float64)
dist.all_gather_into_tensor(value, mine())
same(value, torch.cat([of(r) for r in ranks]))
outputs = [torch.empty(6, dtype=torch.float64) for _ in ranks]
dist.all_to_all(outputs, [mine() + 100 * r for r in ranks])
same(outputs, [of(r) + 100 * rank for r in ranks])
if size > 1:
    received = torch.empty(6, dtype=torch.float64)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine(), (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    )
    for work in works:
        work.wait()
    same(received, of((rank - 1) % size))
half = dist.new_group([size - 1])
if rank == size - 1:
    value = mine()
    dist.all_reduce(value, group=half)
    same(value, mine())
dist.monitored_barrier()
dist.barrier()
dist.destroy_process_group()
print("right")
