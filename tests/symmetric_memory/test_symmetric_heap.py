"""Where blocks lie in the shared heap: first fit, whole pages, nothing overlaps."""

import random

from phalanx._comm.symmetric_memory.memory import ALIGN, BlockPlacement, HeapBlock


def test_blocks_are_whole_pages_side_by_side():
    heap = BlockPlacement(100 * ALIGN, 10)
    assert heap.place(1) == HeapBlock(0, 0, ALIGN)
    assert heap.place(ALIGN) == HeapBlock(1, ALIGN, ALIGN)
    assert heap.place(ALIGN + 1) == HeapBlock(2, 2 * ALIGN, 2 * ALIGN)
    assert heap.place(0) == HeapBlock(3, 4 * ALIGN, ALIGN)


def test_the_first_gap_that_is_large_enough_is_taken():
    heap = BlockPlacement(100 * ALIGN, 10)
    blocks = [heap.place(n * ALIGN) for n in (2, 1, 4, 1)]
    heap.remove(blocks[0])
    heap.remove(blocks[2])
    assert heap.place(3 * ALIGN).offset == blocks[2].offset
    assert heap.place(2 * ALIGN).offset == 0
    assert heap.place(2 * ALIGN).offset == 8 * ALIGN
    assert heap.place(ALIGN).offset == blocks[2].offset + 3 * ALIGN


def test_a_full_heap_and_a_full_table_of_flags_say_none():
    heap = BlockPlacement(4 * ALIGN, 10)
    whole = heap.place(4 * ALIGN)
    assert heap.place(1) is None
    heap.remove(whole)
    assert heap.place(5 * ALIGN) is None
    heap = BlockPlacement(100 * ALIGN, 2)
    first = heap.place(1)
    assert heap.place(1) is not None
    assert heap.place(1) is None
    heap.remove(first)
    assert heap.place(1) == first


def test_random_use_never_overlaps_and_ends_empty():
    random.seed(3)
    heap = BlockPlacement(64 * ALIGN, 16)
    mine = []
    for _ in range(2000):
        if mine and random.random() < 0.5:
            heap.remove(mine.pop(random.randrange(len(mine))))
        elif block := heap.place(random.randrange(1, 9 * ALIGN)):
            mine.append(block)
        assert heap.live == sorted(mine, key=lambda block: block.offset)
        assert len({block.index for block in mine}) == len(mine)
        end = 0
        for block in heap.live:
            assert block.offset >= end
            end = block.offset + block.nbytes
        assert end <= 64 * ALIGN
    for block in mine:
        heap.remove(block)
    assert heap.place(64 * ALIGN).offset == 0
