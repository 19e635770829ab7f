"""The shared heap has a part of the same size for every rank, and all ranks have mapped all of them.

A block lies at the same offset of every rank's heap, so an offset names P pieces of memory, one per rank. The leader
places blocks; the others are told. A block may be placed anew when every rank has let it go, whenever its garbage
collector came round to it: `released` flags in the control memory say so.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

ALIGN = 4096  # pages: a block that is let go can be given back to the system


@dataclass(frozen=True)
class Block:
    """It is a piece of every rank's heap: `index` in the flags, `offset` and `nbytes` in the heap."""

    index: int
    offset: int
    nbytes: int


class BlockPlacement:
    """It says where blocks lie, by first fit over the gaps between live blocks; only the leader keeps one."""

    def __init__(self, heap_bytes: int, max_blocks: int) -> None:
        self.heap_bytes = heap_bytes
        self._free_indices = list(range(max_blocks - 1, -1, -1))
        self._live: list[tuple[int, Block]] = []  # by offset

    @property
    def live(self) -> list[Block]:
        """Return the blocks that some rank may still use, by offset."""
        return [block for _, block in self._live]

    def place(self, nbytes: int) -> Block | None:
        """Return a block of at least `nbytes`, or None when the heap has no gap or no index left."""
        size = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        if not self._free_indices:
            return None
        at = 0
        for offset, block in self._live:
            if offset - at >= size:
                break
            at = offset + block.nbytes
        if at + size > self.heap_bytes:
            return None
        block = Block(self._free_indices.pop(), at, size)
        bisect.insort(self._live, (at, block), key=lambda item: item[0])
        return block

    def remove(self, block: Block) -> None:
        """Free `block`, which every rank has let go."""
        self._live.remove((block.offset, block))
        self._free_indices.append(block.index)
