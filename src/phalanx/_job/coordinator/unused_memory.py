"""Return memory to the system that a burst of answers has left to the C library, which would keep it."""

from __future__ import annotations

from phalanx._base.malloc import give_back_freed_memory

_WORTH_BYTES = 16 << 20


class UnusedMemory:
    """`UnusedMemory` counts what is sent; `give_back` frees the memory that this took, once it is worth it.

    Cost: `give_back` takes a hundredth of a second where hundreds of megabytes were used, and nothing otherwise.
    """

    def __init__(self) -> None:
        self._sent_bytes = 0

    def note_sent(self, nbytes: int) -> None:
        """Note that a message of so many bytes was sent."""
        self._sent_bytes += nbytes

    def give_back(self) -> None:
        """Return unused memory to the system, if much was sent since the last call."""
        if self._sent_bytes >= _WORTH_BYTES:
            self._sent_bytes = 0
            give_back_freed_memory()
