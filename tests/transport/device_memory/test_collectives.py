"""Collectives through memory that all ranks map: drawn calls, in pieces, with the bits of the CPU's own collectives."""

import random

import pytest
import torch
import torch.distributed as dist
from tests.transport.device_memory.file_memory import FileMemory

from phalanx.backend.device_memory import open_areas
from phalanx.core_numbers import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM
from phalanx.deadline import Deadline
from phalanx.dtypes import can_reduce
from phalanx.errors import MismatchError, PeerLostError
from phalanx.testing import run_ranks
from phalanx.transport.base import CallContext
from phalanx.transport.device_memory import DeviceCollectives, can_combine_on_device
from phalanx.transport.staging.streams import InOrder

CPU = torch.device("cpu")
HALF_BYTES = 2048
SUM_OF = "all_reduce(SUM) of float32"
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
)  # fmt: skip
REDUCTIONS = (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)


def _tell_all(mine, nbytes):
    theirs = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    return theirs


def _open(rank, memory):
    """The collectives under test, and the CPU's own."""
    host = dist.group.WORLD.transport
    areas = open_areas(_tell_all, rank, CPU, memory, Deadline.after(30.0), area_bytes=2 * HALF_BYTES)
    return None if areas is None else DeviceCollectives(host, areas, InOrder()), host


def _ctx(host, timeout_s=30.0):
    return CallContext(timeout_s, host.call_site(("test.py", 1)))


def _values(draw, count, dtype, rank):
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30) + 7919 * rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype)


def _tensor(draw, count, dtype, rank, *, plain=False):
    """`count` elements, in one of several shapes and orders in memory; each rank has its own order."""
    values = _values(draw, count, dtype, rank)
    how = random.Random(draw.randrange(1 << 30) + rank).randrange(4)
    if plain or how == 0:
        return values
    if how == 1 and count % 2 == 0:
        return values.view(2, -1).t()
    if how == 2 and dtype.is_complex:
        return values.conj()
    wide = values.new_zeros(2 * count)
    wide[::2] = values
    return wide[::2]


def _one_call(draw, collectives, rank, world):
    """A drawn call; what it leaves in its outputs."""
    host, ctx = collectives
    dtype, redop = draw.choice(DTYPES), draw.choice(REDUCTIONS)
    while not (can_reduce(dtype, redop) and can_combine_on_device(dtype, redop)):
        dtype, redop = draw.choice(DTYPES), draw.choice(REDUCTIONS)
    count = draw.choice((0, 1, 3, 100, HALF_BYTES // dtype.itemsize, draw.randrange(1, 6000)))
    root = draw.randrange(world)
    factor = draw.choice((None, 0.5)) if dtype.is_floating_point and redop == SUM else None
    name = draw.choice(
        ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "all_gather_single", "scatter", "reduce_scatter",
         "reduce_scatter_single")
    )  # fmt: skip
    counts = [count] * world if draw.random() < 0.5 else [draw.randrange(4000) for _ in range(world)]
    mine = _tensor(draw, counts[rank] if name == "all_gather" else count, dtype, rank)
    outputs = [torch.zeros(n, dtype=dtype) for n in (counts if name == "all_gather" else [count] * world)]
    parts = [_tensor(draw, counts[r] if name == "reduce_scatter" else count, dtype, rank) for r in range(world)]
    if name == "all_reduce":
        host.all_reduce(mine, redop, ctx, factor=factor)
    elif name == "reduce":
        host.all_reduce(mine, redop, ctx, root=root, factor=factor)
    elif name == "broadcast":
        host.broadcast(mine, root, ctx)
    elif name == "all_gather":
        host.gather(outputs, mine, ctx)
    elif name == "gather":
        host.gather(outputs if rank == root else [], mine, ctx, root=root)
    elif name == "all_gather_single":
        outputs = [torch.zeros(count * world, dtype=dtype)]
        host.all_gather_single(outputs[0], mine, ctx)
    elif name == "scatter":
        host.scatter(mine, parts if rank == root else [], root, ctx)
    elif name == "reduce_scatter":
        outputs = [torch.zeros(counts[rank], dtype=dtype)]
        host.reduce_scatter(outputs[0], parts, redop, ctx, factor=factor)
    else:
        outputs = [torch.zeros(count, dtype=dtype)]
        host.reduce_scatter_single(outputs[0], _tensor(draw, count * world, dtype, rank, plain=True), redop, ctx)
    exact = redop != PRODUCT or not dtype.is_complex
    return (name, str(dtype), redop, count, counts), [mine, *outputs], exact


def _bytes(tensor):
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten()).view(torch.uint8).tolist()


def _drawn(rank, world, first, programs):
    device, host = _open(rank, FileMemory())
    for seed in range(first, first + programs):
        results = []
        for collectives in (device, host):
            draw = random.Random(seed)
            calls = [_one_call(draw, (collectives, _ctx(host)), rank, world) for _ in range(6)]
            results.append(calls)
        for (what, got, exact), (_, expected, _) in zip(*results, strict=True):
            for one, other in zip(got, expected, strict=True):
                if exact:
                    assert _bytes(one) == _bytes(other), (seed, what)
                else:
                    torch.testing.assert_close(one, other)
    device.close()
    return True


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_drawn_calls_leave_the_bits_that_the_cpus_leave(world_size) -> None:
    assert all(run_ranks(_drawn, world_size, 100 * world_size, 40))


def _without_one(rank, world, refuses):
    device, _ = _open(rank, FileMemory(refuses if rank == 1 else ""))
    dist.barrier()
    return device


@pytest.mark.parametrize("refuses", ["create", "open"])
def test_where_one_rank_cannot_map_the_others_memory_none_does(refuses) -> None:
    assert run_ranks(_without_one, 3, refuses) == [None] * 3


def _one_fails_in_between(rank, world):
    """A call that ends in an error after the ranks have met must not leave a rank in another turn than the others."""
    device, host = _open(rank, FileMemory())
    tensor = torch.full((3,), rank + 1.0)
    if rank == 1:  # it gives the others its values, and cannot write its own result
        with pytest.raises(RuntimeError):
            device.all_reduce(tensor.expand(2, 3), SUM, _ctx(host))
    else:
        device.all_reduce(torch.full((2, 3), rank + 1.0), SUM, _ctx(host))
    device.all_reduce(tensor, SUM, _ctx(host))
    return tensor.tolist()


def test_a_call_that_fails_on_one_rank_alone_spoils_no_later_one() -> None:
    assert run_ranks(_one_fails_in_between, 2) == [[3.0] * 3] * 2


def _differs(rank, world, how):
    device, host = _open(rank, FileMemory())
    tensor = torch.full((3 + (rank if how == "sizes" else 0),), 7.0)
    carrier = host if how == "places" and rank == 1 else device
    call, number = (carrier.broadcast, 0) if how == "operations" and rank == 1 else (carrier.all_reduce, SUM)
    with pytest.raises(MismatchError) as caught:
        call(tensor, number, _ctx(host))
    return str(caught.value), set(tensor.tolist())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("sizes", [f"0: {SUM_OF} (3,) in a device's memory at", f"1: {SUM_OF} (4,) in a device's memory at"]),
        ("operations", ["1: broadcast(src=0) of float32 (3,) in a device's memory at test.py:1"]),
        ("places", [f"0: {SUM_OF} (3,) in a device's memory at", f"1: {SUM_OF} (3,) at"]),
    ],
)
def test_ranks_that_call_different_things_are_told_and_nothing_is_changed(how, words) -> None:
    for message, values in run_ranks(_differs, 2, how):
        assert values == {7.0}
        for expected in words:
            assert f"rank {expected}" in message


def _leaves(rank, world):
    device, host = _open(rank, FileMemory())
    if rank == 1:
        return None
    with pytest.raises(PeerLostError) as caught:
        device.all_reduce(torch.ones(3), SUM, _ctx(host))
    return str(caught.value)


def test_a_rank_that_leaves_is_named() -> None:
    message, _ = run_ranks(_leaves, 2)
    assert "all_reduce #" in message
    assert "rank 1" in message


def test_what_a_device_has_no_kernels_for_is_left_to_the_host() -> None:
    assert can_combine_on_device(torch.uint16, SUM)
    assert not can_combine_on_device(torch.uint16, MAX)
    assert not can_combine_on_device(torch.int32, AVG)
    assert can_combine_on_device(torch.bfloat16, AVG)


def test_writes_are_not_counted_as_changes_by_autograd() -> None:
    from phalanx.transport.tensors import uncounted

    tensor = torch.zeros(2)
    before = tensor._version
    with uncounted(tensor) as alias:
        alias.fill_(3.0)
    assert tensor.tolist() == [3.0, 3.0]
    assert tensor._version == before
    with torch.inference_mode():
        tensor = torch.zeros(2)
    with uncounted(tensor) as alias:
        alias.fill_(3.0)
    assert tensor.tolist() == [3.0, 3.0]
