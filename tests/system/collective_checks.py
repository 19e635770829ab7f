"""What every rank of a group across hosts can check by itself, whatever carries the bytes: all know what all bring."""

from __future__ import annotations

import torch
import torch.distributed as dist


def tensor_of(rank, shape, dtype, salt=0):
    """What `rank` brings: small whole numbers, so that every order of addition gives the same bits."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def reductions(rank, world_size):
    ops = {
        dist.ReduceOp.SUM: lambda all_: torch.stack(all_).sum(0),
        dist.ReduceOp.PRODUCT: lambda all_: torch.stack(all_).prod(0),
        dist.ReduceOp.MAX: lambda all_: torch.stack(all_).amax(0),
        dist.ReduceOp.MIN: lambda all_: torch.stack(all_).amin(0),
    }
    for shape in [(0,), (), (1,), (7, 3), (50_001,)]:
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8):
            brought = [tensor_of(r, shape, dtype) for r in range(world_size)]
            for op, combine in ops.items() if dtype == torch.int64 else list(ops.items())[:1]:
                mine = brought[rank].clone()
                dist.all_reduce(mine, op=op)
                assert torch.equal(mine, combine(brought).to(dtype)), (shape, dtype, op)
        brought = [tensor_of(r, shape, torch.float32) for r in range(world_size)]
        mine = brought[rank].clone()
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(mine, torch.stack(brought).mean(0))
        mine = brought[rank].clone()
        dist.reduce(mine, dst=world_size - 1)
        assert torch.equal(mine, torch.stack(brought).sum(0) if rank == world_size - 1 else brought[rank])
        # A tensor whose elements do not lie in order.
        if len(shape) == 2:
            mine = brought[rank].clone().t()
            dist.all_reduce(mine)
            assert torch.equal(mine, torch.stack(brought).sum(0).t())
    for rows in (0, 1, 5):
        brought = [tensor_of(r, (world_size * rows, 3), torch.float32) for r in range(world_size)]
        total = torch.stack(brought).sum(0)
        output = torch.empty(rows, 3)
        dist.reduce_scatter_single(output, brought[rank])
        assert torch.equal(output, total[rank * rows : (rank + 1) * rows])
        dist.reduce_scatter(output, list(brought[rank].split(rows)) if rows else [torch.empty(0, 3)] * world_size)
        assert torch.equal(output, total[rank * rows : (rank + 1) * rows])
    uneven = [[tensor_of(r, (part + 1,), torch.float16, part) for part in range(world_size)] for r in range(world_size)]
    output = torch.empty(rank + 1, dtype=torch.float16)
    dist.reduce_scatter(output, uneven[rank], op=dist.ReduceOp.AVG)
    torch.testing.assert_close(output, torch.stack([uneven[r][rank] for r in range(world_size)]).float().mean(0).half())


def moves(rank, world_size):
    for shape in [(0,), (1,), (5, 3), (10_001,)]:
        for dtype in (torch.float32, torch.bool, torch.complex64):
            brought = [tensor_of(r, shape, dtype) for r in range(world_size)]
            for root in range(world_size):
                mine = brought[rank].clone()
                dist.broadcast(mine, src=root)
                assert torch.equal(mine, brought[root])
            got = [torch.empty(shape, dtype=dtype) for _ in range(world_size)]
            dist.all_gather(got, brought[rank])
            assert all(map(torch.equal, got, brought))
            root = world_size - 1
            got = [torch.empty(shape, dtype=dtype) for _ in range(world_size)]
            dist.gather(brought[rank], got if rank == root else None, dst=root)
            assert rank != root or all(map(torch.equal, got, brought))
            mine = torch.empty(shape, dtype=dtype)
            parts = [tensor_of(r, shape, dtype, salt=7) for r in range(world_size)]
            dist.scatter(mine, parts if rank == 1 else None, src=1)
            assert torch.equal(mine, parts[rank])
            got = [torch.empty(shape, dtype=dtype) for _ in range(world_size)]
            dist.all_to_all(got, [tensor_of(rank, shape, dtype, salt=r) for r in range(world_size)])
            assert all(map(torch.equal, got, [tensor_of(r, shape, dtype, salt=rank) for r in range(world_size)]))
            whole = torch.empty(world_size * max(1, len(brought[0].view(-1))), dtype=dtype)
            dist.all_gather_single(whole[: world_size * brought[0].numel()], brought[rank].view(-1))
            assert torch.equal(whole[: world_size * brought[0].numel()], torch.cat([t.view(-1) for t in brought]))
    # Rank r sends r + d elements to rank d.
    sent = torch.cat([torch.full((rank + d,), 10.0 * rank + d) for d in range(world_size)])
    output = torch.empty(sum(r + rank for r in range(world_size)))
    dist.all_to_all_single(output, sent, [r + rank for r in range(world_size)], [rank + d for d in range(world_size)])
    assert torch.equal(output, torch.cat([torch.full((r + rank,), 10.0 * r + rank) for r in range(world_size)]))
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(world_size)]
    dist.barrier()


def messages(rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for shape in [(0,), (1,), (70_001,)]:
        got = torch.empty(shape)
        work = dist.isend(tensor_of(rank, shape, torch.float32), right, tag=3)
        dist.recv(got, left, tag=3)
        work.wait()
        assert torch.equal(got, tensor_of(left, shape, torch.float32))
    if rank == 0:
        seen = set()
        for _ in range(world_size - 1):
            got = torch.empty(2)
            source = dist.recv(got)
            assert got.tolist() == [float(source)] * 2
            seen.add(source)
        assert seen == set(range(1, world_size))
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()
    # Messages with different tags do not wait for each other, whichever side names them in which order.
    last = world_size - 1
    if rank == 0:
        first, second = torch.empty(1), torch.empty(1)
        works = [dist.irecv(first, last, tag=1), dist.irecv(second, last, tag=2)]
        works[1].wait()
        dist.send(second, last, tag=3)
        works[0].wait()
        assert (first.item(), second.item()) == (1.0, 2.0)
        work = dist.isend(first, last, tag=4)
        dist.send(second, last, tag=5)
        work.wait()
    elif rank == last:
        got = torch.empty(1)
        dist.send(torch.tensor([2.0]), 0, tag=2)
        dist.recv(got, 0, tag=3)
        dist.send(torch.tensor([1.0]), 0, tag=1)
        dist.recv(got, 0, tag=5)
        assert got.item() == 2.0
        dist.recv(got, 0, tag=4)
        assert got.item() == 1.0
    dist.barrier()
