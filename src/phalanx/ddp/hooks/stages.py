"""Run hooks that need several collectives per bucket in one order on every rank.

PyTorch's hooks chain futures: the second collective is started by a callback of the first, on whichever thread that
ended. With several buckets, ranks then start collectives in different orders; Gloo aborts the process. Here a hook is a
generator that yields each collective when it is in flight, and goes on when it is over. The thread of the backward
alone moves generators on, at moments that are the same on every rank:

    launch of bucket 0     0a
    launch of bucket 1     1a  0b                   a, b, ...: the stages; each waits for the one before it
    launch of bucket 2     2a  0c  1b
    end of backward        waits for 0, 1, 2 in this order: 1c  2b  2c
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.ddp.comm_hook import GradBucket


class PendingCollective(Protocol):
    """A `PendingCollective` is a collective in flight, which `async_op=True` returns.

    Some calls return None, for ranks outside of the group.
    """

    def wait(self) -> Any:
        """Wait until it is over."""


Stages = Generator[PendingCollective | None, None, Tensor]
"""A generator that yields each collective in flight and returns the bucket's new content."""


class Flight:
    """A flight is one bucket's stages, as far as they have come."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._pending: PendingCollective | None = None
        self.result: Tensor | None = None
        self._go_on()

    @property
    def landed(self) -> bool:
        """Return whether the bucket's new content is there."""
        return self.result is not None

    def advance(self) -> None:
        """Wait for the collective in flight, and go on to the next one or to the end."""
        if self._pending is not None:
            self._pending.wait()
        self._go_on()

    def _go_on(self) -> None:
        try:
            self._pending = next(self._stages)
        except StopIteration as end:
            self.result = end.value

    def land(self) -> Tensor:
        """Go through all remaining stages, and return the bucket's new content."""
        while self.result is None:
            self.advance()
        return self.result


class StagedBuckets:
    """A pipeline has the flights of one backward. A state of a hook holds one; it is not for two models at a time."""

    def __init__(self) -> None:
        self._flying: list[Flight] = []

    def launch(self, bucket: Any, stages: Stages) -> torch.futures.Future[Tensor]:
        """Start the first stage of `bucket`, then move on each earlier bucket by one stage.

        Under PyTorch's own DistributedDataParallel, which can't be told when to move on, all stages run now.
        """
        if bucket.index() == 0:
            self._flying = []  # what an interrupted backward left
        flight = Flight(stages)
        if not isinstance(bucket, GradBucket):
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(flight.land())
            return future
        for earlier in self._flying:
            earlier.advance()
        self._flying = [one for one in [*self._flying, flight] if not one.landed]
        return _OnDemand(flight.land)


class _OnDemand(torch.futures.Future[Tensor]):
    """This is a future whose value is made by the thread that waits for it. Errors keep their type.

    The exchange waits for it; `then` serves the wrappers, which put a step of their own behind a hook's.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make

    def wait(self) -> Any:
        """Make the value if no thread has."""
        if not self.done():
            self.set_result(self._make())
        return super().wait()

    value = wait

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return what `callback` makes of this future, when a thread waits for it."""

        def make() -> Any:
            self.wait()
            return callback(self)

        return _OnDemand(make)
