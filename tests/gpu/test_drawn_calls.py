"""Sequences of collectives that are drawn from a seed give on a device the bits that they give on the CPU.

Groups, operations, dtypes, sizes and layouts are drawn, and when a call that is under way is waited for.
"""

import random

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.filterwarnings("ignore:.*The operator aten")  # the simulated device has few kernels of its own

CALLS = 50
# Torch 2.12 gave them new names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
LAYOUTS = (
    lambda flat: flat,
    lambda flat: flat[: flat.numel() // 2 * 2].view(2, -1).t(),
    lambda flat: flat[: flat.numel() // 12 * 12].view(1, 3, 2, -1).contiguous(memory_format=torch.channels_last),
    lambda flat: flat.repeat_interleave(2)[::2],
)


def _drawn(rank, world_size, place, seed):
    device = place.join(rank, world_size)
    pairs = dist.new_group(list(range(world_size - 1)))  # one rank is not in it
    draw = random.Random(seed)  # the same on all ranks
    waits = random.Random(seed + 100 * rank)
    under_way, wrong = [], []

    def settle(down_to):
        while len(under_way) > down_to:
            what, works, outputs = under_way.pop(waits.randrange(len(under_way)))
            for work in works:
                work.wait()
            on_cpu, on_device = outputs
            if not torch.equal(on_cpu, on_device.cpu()):
                wrong.append(what)

    for number in range(CALLS):
        members = draw.choice([world_size, world_size, world_size - 1])
        name = draw.choice(sorted(CALLS_BY_NAME))
        dtype, layout = draw.choice(DTYPES), draw.randrange(len(LAYOUTS))
        count, root = int(10 ** draw.uniform(1.2, 5.5)), draw.randrange(members)
        op = draw.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
        if rank >= members:
            continue
        group = dist.group.WORLD if members == world_size else pairs
        works, outputs = [], []
        for where in ("cpu", device):
            generator = torch.Generator().manual_seed(1000 * number + rank)
            flat = torch.randint(0, 50, (count // members * members + members,), generator=generator).to(dtype)
            tensor = LAYOUTS[layout](flat.to(where))
            work, output = CALLS_BY_NAME[name](tensor, members, root, op, group)
            works.append(work)
            outputs.append(output)
        under_way.append(((number, name, dtype, layout, count), works, outputs))
        settle(waits.randrange(4))
    settle(0)
    dist.barrier()
    return wrong


def _all_reduce(tensor, members, root, op, group):
    return dist.all_reduce(tensor, op, group=group, async_op=True), tensor


def _broadcast(tensor, members, root, op, group):
    return dist.broadcast(tensor, root, group=group, async_op=True), tensor


def _reduce(tensor, members, root, op, group):
    work = dist.reduce(tensor, root, op, group=group, async_op=True)
    return work, tensor if dist.get_rank() == root else torch.zeros(1)


def _all_gather(tensor, members, root, op, group):
    tensor = tensor.contiguous()
    output = tensor.new_zeros(members * tensor.numel())
    return all_gather_single(output, tensor.flatten(), group=group, async_op=True), output


def _reduce_scatter(tensor, members, root, op, group):
    flat = tensor.contiguous().flatten()
    flat = flat[: flat.numel() // members * members]
    output = tensor.new_zeros(flat.numel() // members)
    return reduce_scatter_single(output, flat, op, group=group, async_op=True), output


def _all_to_all(tensor, members, root, op, group):
    flat = tensor.contiguous().flatten()
    flat = flat[: flat.numel() // members * members]
    output = torch.zeros_like(flat)
    return dist.all_to_all_single(output, flat, group=group, async_op=True), output


CALLS_BY_NAME = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


@pytest.mark.parametrize("seed", range(4))
def test_drawn_collectives_leave_the_bits_that_they_leave_on_the_cpu(place, seed):
    assert place.run(_drawn, 3, seed) == [[], [], []]
