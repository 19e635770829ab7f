"""Collectives between hosts against plain Gloo over the same ranks, on cases that a generator draws."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from tests.system.collective_checks import tensor_of
from tests.system.hosts_jobs import on_hosts

from phalanx._comm.transport.hierarchical import bruck
from phalanx._comm.transport.hierarchical.exchange import SMALL_BYTES
from phalanx.testing import why_no_hosts

pytestmark = [
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
    pytest.mark.usefixtures("small_segments"),
]

DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.float16, torch.bfloat16)
REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
OPERATIONS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single", "all_gather of uneven parts", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_single", "all_to_all", "barrier",
)  # fmt: skip


class Case:
    """An operation on tensors that every rank can tell; `parts` are the elements that belong to each rank."""

    def __init__(self, seed, world_size, num_hosts):
        draw = random.Random(seed)
        self.seed, self.world_size, self.num_hosts = seed, world_size, num_hosts
        self.operation = draw.choice(OPERATIONS)
        self.dtype = draw.choice(DTYPES)
        self.reduction = draw.choice(REDUCTIONS)
        self.root = draw.randrange(world_size)
        limit = SMALL_BYTES // (num_hosts - 1) // self.dtype.itemsize
        # Nothing, little, about as much as still travels with the head of the call, and several segments.
        count = draw.choice(
            (0, 1, draw.randrange(2, 300), limit + draw.randrange(-2, 3), draw.randrange(limit, 6 * limit))
        )
        if self.operation in ("scatter", "gather", "all_to_all"):
            count //= 4
        self.count = count
        self.part = count // world_size
        self.is_async = draw.random() < 0.4
        self.strided = draw.random() < 0.3

    def tensor(self, rank, count, salt=0):
        """What `rank` brings; sometimes its elements do not lie one after the other."""
        tensor = tensor_of(rank, (count,), self.dtype, salt=10 * self.seed + salt)
        if not self.strided:
            return tensor
        wide = torch.zeros((count, 2), dtype=self.dtype)
        wide[:, 0] = tensor
        return wide[:, 0]

    def call(self, group, rank):
        """What the operation leaves on this rank, and the work that must be over before."""
        n, part, world = self.count, self.part, self.world_size
        everything = {"group": group, "async_op": self.is_async}
        mine = self.tensor(rank, n)
        if self.operation == "all_reduce":
            return [mine], dist.all_reduce(mine, op=self.reduction, **everything)
        if self.operation == "reduce":
            work = dist.reduce(mine, dst=self.root, op=self.reduction, **everything)
            return [mine] if rank == self.root else [], work  # Gloo leaves something in the others' tensors
        if self.operation == "broadcast":
            return [mine], dist.broadcast(mine, src=self.root, **everything)
        if self.operation == "all_gather":
            outputs = [torch.empty(n, dtype=self.dtype) for _ in range(world)]
            return outputs, dist.all_gather(outputs, mine, **everything)
        if self.operation == "all_gather_single":
            output = torch.empty(part * world, dtype=self.dtype)
            return [output], dist.all_gather_single(output, self.tensor(rank, part).contiguous(), **everything)
        if self.operation == "gather":
            outputs = [torch.empty(part, dtype=self.dtype) for _ in range(world)] if rank == self.root else None
            work = dist.gather(self.tensor(rank, part), outputs, dst=self.root, **everything)
            return outputs or [], work
        if self.operation == "scatter":
            output = torch.empty(part, dtype=self.dtype)
            inputs = [self.tensor(rank, part, salt=r) for r in range(world)] if rank == self.root else None
            return [output], dist.scatter(output, inputs, src=self.root, **everything)
        if self.operation == "reduce_scatter_single":
            output = torch.empty(part, dtype=self.dtype)
            whole = self.tensor(rank, part * world).contiguous()
            return [output], dist.reduce_scatter_single(output, whole, op=self.reduction, **everything)
        if self.operation == "reduce_scatter":
            output = torch.empty(part, dtype=self.dtype)
            inputs = [self.tensor(rank, part, salt=r) for r in range(world)]
            return [output], dist.reduce_scatter(output, inputs, op=self.reduction, **everything)
        if self.operation == "all_to_all":
            outputs = [torch.empty(part, dtype=self.dtype) for _ in range(world)]
            inputs = [self.tensor(rank, part, salt=r) for r in range(world)]
            return outputs, dist.all_to_all(outputs, inputs, **everything)
        if self.operation == "all_gather of uneven parts":
            outputs = [torch.empty(part + r, dtype=self.dtype) for r in range(world)]
            return outputs, dist.all_gather(outputs, self.tensor(rank, part + rank), **everything)
        return [], dist.barrier(**everything)

    def expected(self, group, rank):
        """What Gloo says, where it can be asked: it knows no uneven parts, and takes strided tensors for dense ones."""
        if self.operation == "all_gather of uneven parts":
            return [self.tensor(r, self.part + r) for r in range(self.world_size)]
        dense = Case(self.seed, self.world_size, self.num_hosts)
        dense.strided = False
        outputs, work = dense.call(group, rank)
        if work is not None:
            work.wait()
        return outputs

    def __str__(self):
        shape = f"{self.count} of {self.dtype}{', strided' if self.strided else ''}"
        return f"case {self.seed}: {self.operation}({self.reduction}, root={self.root}) of {shape}"


def exact(case):
    """Products of whole numbers stay exact in every order, for few ranks; halves only where sums are small."""
    return case.reduction is not dist.ReduceOp.PRODUCT or case.dtype not in (torch.float16, torch.bfloat16)


@pytest.mark.slow(but=("(1, 1, 1)-2",))
@pytest.mark.parametrize(
    ("sizes", "most_direct"),
    [((2, 2), 5), ((1, 1, 1), 5), ((3, 1), 5), ((2, 3), 5), ((1, 1, 1), 2), ((1, 2, 1, 1, 2), 4)],
    ids=str,
)
def test_generated_collectives_give_what_gloo_gives(sizes, most_direct):
    """Leaders of more hosts than `most_direct` forward each other's messages."""

    def check(rank, world_size, machines):
        gloo = dist.new_group(list(range(world_size)), backend="gloo")
        under_way = []
        for seed in range(70):
            case = Case(seed, world_size, len(sizes))
            outputs, work = case.call(None, rank)
            under_way.append((case, outputs, work))
            if len(under_way) < 4 and seed < 69:  # several asynchronous ones at once, with others between
                continue
            for late, got, pending in under_way:
                if pending is not None:
                    pending.wait()
                expected = late.expected(gloo, rank)
                for ours, theirs in zip(got, expected, strict=True):
                    assert not exact(late) or torch.equal(ours, theirs), str(late)
            under_way.clear()
        return True

    # Gloo's own group takes the interface that it is told.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        patch.setattr(bruck, "MOST_DIRECT", most_direct)
        assert all(on_hosts(sizes, check, timeout_s=30.0))
