"""Count the batches that a loop got from a DataLoader with workers, which take indices ahead of the loop."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from phalanx.data.index_stream import IndexStream, ShareStream, TurnStream
from phalanx.errors import CheckpointError


class HandedOut:
    """It counts the batches that an iterator hands to the loop, and keeps the count when the iterator is gone."""

    def __init__(self, iterator: Any) -> None:
        self._attributes: dict[str, Any] = vars(iterator)  # the iterator itself would keep its workers alive
        self._before: int = iterator._num_yielded  # of earlier epochs, or of a state that was loaded
        self._count = 0
        self._reference = weakref.ref(iterator, self._on_end)

    def _on_end(self, _: object) -> None:
        self._count = self.num_batches
        self._attributes = {}

    @property
    def num_batches(self) -> int:
        """Return how many batches of this pass the loop got."""
        number: int = self._attributes.get("_num_yielded", self._count + self._before)
        return number - self._before


@dataclass(frozen=True)
class LoaderPass:
    """A pass over a sampler by a DataLoader whose workers take indices ahead.

    `batch_size` is None where nobody can tell how many samples a batch has; a batch is of one of `num_parts` parts.
    """

    stream: IndexStream | TurnStream | ShareStream
    handed_out: HandedOut
    batch_size: int | None
    num_parts: int
    drops_last: bool
    loader: str

    @property
    def samples(self) -> int:
        """Return how many samples of each part the loop has used up.

        Raises:
            CheckpointError: nobody can tell.
        """
        if self.batch_size is None:
            raise CheckpointError(
                f"the workers of {self.loader} have taken indices ahead of the loop, and nobody can tell how many "
                "samples the loop has used. Give state_dict(consumed=...) of the sampler as the part, save the loader "
                "in place of the sampler if it has a state_dict, or give its batch_sampler the attributes `sampler` "
                "and `batch_size`."
            )
        count = self.stream.partition.count
        used = min(self.handed_out.num_batches // self.num_parts * self.batch_size, count)
        return count if self.drops_last and count - used < self.batch_size else used


def pass_of(loader: Any, sampler: Any, iterator: Any, stream: Any) -> LoaderPass:
    """Return the pass over `sampler`, by indices of `stream`, which `loader` has begun with `iterator`."""
    batches = getattr(loader, "batch_sampler", None)
    is_over = sampler is getattr(loader if batches is None else batches, "sampler", None)
    size = 1 if batches is None else getattr(batches, "batch_size", None)
    if sampler.is_shared:
        size = sampler.turn
    # One with a state takes up the middle of a pass by itself.
    known = is_over and isinstance(size, int) and not hasattr(loader, "state_dict")
    return LoaderPass(
        stream,
        HandedOut(iterator),
        size if known else None,
        sampler.num_parts,
        bool(getattr(batches, "drop_last", False)),
        type(loader).__name__,
    )
