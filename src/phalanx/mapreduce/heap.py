"""Give freed memory back to the system: C's allocator keeps it, and large values of changing sizes leave holes.

In a test with values of 1 MB, 70 MB had been freed and were still held, where 16 were asked for.
"""

from __future__ import annotations

from phalanx._base.malloc import give_back_freed_memory

_LARGE_BYTES = 32 << 10


def give_back(held_bytes: int, count: int) -> None:
    """Give memory back after so many values of so many bytes in all were freed; do nothing if they were small."""
    if count and held_bytes // count >= _LARGE_BYTES:
        give_back_freed_memory()
