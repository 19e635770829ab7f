"""What the rank program needs to know of a contestant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from cases import Case


class NotOfferedError(Exception):
    """This contestant, or this version of it, has no such operation; the text says what is missing."""


@dataclass(frozen=True)
class BoundCall:
    """One operation, ready to be called again and again on the same memory.

    `source` and `target` are float32 views of what the call reads and writes: the same memory where the interface works
    in place, as `torch.distributed.all_reduce` does.
    """

    run: Callable[[], object]
    source: np.ndarray
    target: np.ndarray


@dataclass(frozen=True)
class Options:
    """Where the ranks of this run meet, and which variety of the contestant is wanted."""

    variety: str
    rendezvous_folder: str  # an empty folder that the ranks share


class Contestant(Protocol):
    """One rank of a contestant, connected to the others."""

    def bind(self, case: Case) -> BoundCall:
        """Prepare a case.

        Raises:
            NotOfferedError: there is no such operation.
        """

    def barrier(self) -> None:
        """Wait for the other ranks."""

    def close(self) -> None:
        """Leave; all ranks do."""
