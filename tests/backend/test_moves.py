"""The collectives that combine nothing: every dtype, every size where the core changes its way, every root."""

import pytest
import torch
import torch.distributed as dist
from tests.backend.inputs import EVERY_DTYPE, assert_same, tensor_of
from tests.on_ranks import on_ranks

WORLD_SIZES = (1, 2, 3)
# Bytes: none, one, a line and a bit, around a stage's part for 4 ranks, a stage, and several with a rest.
BYTES = (0, 1, 65, 32_767, 32_769, 131_071, 131_072, 131_073, 300_007)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_broadcast_gather_and_scatter_move_bytes_to_and_from_every_root(rank, world_size):
    for size in BYTES:
        theirs = [tensor_of(r, size, torch.uint8) for r in range(world_size)]
        parts = [tensor_of(100 + r, size, torch.uint8) for r in range(world_size)]
        for root in range(world_size):
            tensor = theirs[rank].clone()
            dist.broadcast(tensor, root)
            assert_same(tensor, theirs[root], ("broadcast", size, root))

            outputs = [torch.zeros_like(tensor) for _ in range(world_size)] if rank == root else None
            dist.gather(theirs[rank], outputs, root)
            for r, output in enumerate(outputs or ()):
                assert_same(output, theirs[r], ("gather", size, root))

            output = torch.zeros_like(tensor)
            dist.scatter(output, parts if rank == root else None, root)
            assert_same(output, parts[rank], ("scatter", size, root))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_all_gather_in_all_its_forms(rank, world_size):
    for size in BYTES:
        theirs = [tensor_of(r, size, torch.uint8) for r in range(world_size)]

        outputs = [torch.zeros(size, dtype=torch.uint8) for _ in range(world_size)]
        dist.all_gather(outputs, theirs[rank])
        for r, output in enumerate(outputs):
            assert_same(output, theirs[r], ("all_gather", size))

        whole = torch.zeros(world_size * size, dtype=torch.uint8)
        dist.all_gather_single(whole, theirs[rank])
        assert_same(whole, torch.cat(theirs), ("all_gather_into_tensor", size))

        stacked = torch.zeros((world_size, size), dtype=torch.uint8)
        stacked[rank] = theirs[rank]
        dist.all_gather_single(stacked, stacked[rank])  # from a part of the output itself
        assert_same(stacked, torch.stack(theirs), ("in place", size))


@on_ranks(3)
def test_all_gather_and_gather_take_a_different_size_from_each_rank(rank, world_size):
    sizes = (5, 0, 70_000)
    theirs = [tensor_of(r, sizes[r]) for r in range(world_size)]
    outputs = [torch.zeros(n) for n in sizes]
    dist.all_gather(outputs, theirs[rank])
    for r, output in enumerate(outputs):
        assert_same(output, theirs[r], r)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_all_to_all_gives_each_rank_what_each_had_for_it(rank, world_size):
    for size in BYTES:
        parts = [tensor_of(r, (world_size, size), torch.uint8) for r in range(world_size)]
        expected = torch.stack([parts[r][rank] for r in range(world_size)])

        output = torch.zeros_like(expected)
        dist.all_to_all_single(output, parts[rank].clone())
        assert_same(output, expected, ("single", size))

        outputs = [torch.zeros(size, dtype=torch.uint8) for _ in range(world_size)]
        dist.all_to_all(outputs, list(parts[rank]))
        assert_same(torch.stack(outputs), expected, ("list", size))

    for scale in (1, 3, 20_000):  # rank r has r + 2·d rows for rank d; some have none
        rows = [[(r + 2 * d) % 4 * scale for d in range(world_size)] for r in range(world_size)]
        tensors = [tensor_of(r, (sum(rows[r]), 2)) for r in range(world_size)]
        pieces = [t.split(rows[r]) for r, t in enumerate(tensors)]
        expected = torch.cat([pieces[r][rank] for r in range(world_size)])
        output = torch.zeros_like(expected)
        dist.all_to_all_single(output, tensors[rank], [rows[r][rank] for r in range(world_size)], rows[rank])
        assert_same(output, expected, ("uneven", scale))

        outputs = [torch.zeros(rows[r][rank], 2) for r in range(world_size)]
        dist.all_to_all(outputs, list(pieces[rank]))
        assert_same(torch.cat(outputs), expected, ("uneven list", scale))


@pytest.mark.parametrize("world_size", [3])
@on_ranks()
def test_one_rank_may_give_split_sizes_where_another_does_not_need_any(rank, world_size):
    tensor = torch.arange(2.0 * world_size) + 10 * rank
    output = torch.zeros(2 * world_size)
    splits = [2] * world_size if rank == 0 else None
    dist.all_to_all_single(output, tensor, splits, splits)
    assert output.tolist() == [10.0 * r + 2 * rank + i for r in range(world_size) for i in range(2)]


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_every_dtype_is_moved_bit_for_bit(rank, world_size):
    for dtype in EVERY_DTYPE:
        theirs = [tensor_of(r, (world_size, 5), dtype) for r in range(world_size)]
        mine = theirs[rank]
        group = dist.group.WORLD

        tensor = mine.clone()
        dist.broadcast(tensor, world_size - 1)
        assert_same(tensor, theirs[-1], dtype)

        output = torch.zeros_like(mine)
        group.all_to_all_single(output, mine, [], []).wait()
        assert_same(output, torch.stack([t.view(torch.uint8)[rank] for t in theirs]).view(dtype), dtype)

        outputs = [torch.zeros_like(mine) for _ in range(world_size)]
        dist.all_gather(outputs, mine)
        for r, output in enumerate(outputs):
            assert_same(output, theirs[r], dtype)

        output = torch.zeros_like(mine)
        dist.scatter(output, outputs if rank == 0 else None, 0)
        assert_same(output, theirs[rank], dtype)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_barriers_and_objects(rank, world_size):
    dist.barrier()
    dist.group.WORLD.monitored_barrier()

    objects = [{"from": rank, "data": list(range(1000 * r))} for r in range(world_size)]
    gathered = [None] * world_size
    dist.all_gather_object(gathered, objects[rank])
    assert [(o["from"], len(o["data"])) for o in gathered] == [(r, 1000 * r) for r in range(world_size)]

    shared = [objects[0], "two", rank] if rank == 0 else [None, None, None]
    dist.broadcast_object_list(shared, 0)
    assert (shared[1], shared[2]) == ("two", 0)

    got = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(world_size)] if rank == 0 else None, 0)
    assert got == [f"for {rank}"]

    last = world_size - 1
    collected = [None] * world_size if rank == last else None
    dist.gather_object(("rank", rank), collected, last)
    assert collected is None or collected == [("rank", r) for r in range(world_size)]
