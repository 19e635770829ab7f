"""Memory that a burst of answers has left to the C library, which keeps it, given back to the system."""

from __future__ import annotations

import ctypes

_WORTH_BYTES = 16 << 20


class UnusedMemory:
    """Counts what is sent; `give_back` frees what that has taken, once enough has been sent to be worth it.

    Cost: `give_back` takes a hundredth of a second where hundreds of megabytes were used, and nothing otherwise.
    """

    def __init__(self) -> None:
        self._sent_bytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the C library of Linux has it

    def note_sent(self, nbytes: int) -> None:
        """Note that a message of so many bytes was sent."""
        self._sent_bytes += nbytes

    def give_back(self) -> None:
        """Give back what is not used any more, if much was sent since the last call."""
        if self._sent_bytes >= _WORTH_BYTES:
            self._sent_bytes = 0
            if self._trim is not None:
                self._trim(0)
