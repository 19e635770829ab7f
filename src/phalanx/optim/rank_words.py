"""`RankWords` are numbers in shared memory, one per rank of a host, that all ranks read without a message."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.shared import shared_empty

_WORDS_APART = 16  # in 64-bit words: each rank's word has cache lines of its own


class RankWords:
    """`RankWords` has a word for each rank of `group`, and a common word, all initially 0. Construction is collective.

    A rank that reads a word sees everything written before the word (csrc/word.h); plain stores of a tensor's elements
    keep that order on x86, but not necessarily on ARM.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._world_size = group.rank(), group.size()
        count = (self._world_size + 1) * _WORDS_APART  # the last is the common word
        self._words: Tensor = shared_empty(count, dtype=torch.int64, group=group, owner=0)
        if self._rank == 0:
            self._words.zero_()
        dist.barrier(group=group)

    def store(self, word: int) -> None:
        from phalanx import _core  # the C core may be missing, but then ranks share no memory

        _core.store_word(self._address(self._rank), word)

    def load(self, rank: int) -> int:
        from phalanx import _core

        return _core.load_word(self._address(rank))

    def load_common(self) -> int:
        return self.load(self._world_size)

    def exchange_common(self, before: int, word: int) -> None:
        """Write the common word if its value is still `before`: an atomic compare-and-exchange."""
        from phalanx import _core

        _core.compare_exchange_word(self._address(self._world_size), before, word)

    def _address(self, rank: int) -> int:
        return self._words.data_ptr() + rank * _WORDS_APART * self._words.element_size()
