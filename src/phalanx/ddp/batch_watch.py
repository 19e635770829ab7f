"""Watch the batches of a module that averages gradients by itself: each rank should get its part, in a new order.

    steps 1 to 3    every rank keeps a digest of what its forward was given
    behind them     every rank leaves its digests in the group's store; rank 0 looks now and then whether all are there
    afterwards      rank 0 looks whether the first batches come again in their order, as they do without set_epoch

Nothing of it is collective, and no rank waits, since only torch knows where its DistributedDataParallel has its ranks
in step.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.ddp.digest import digest, digests, has_bytes
from phalanx.ddp.epoch_order import EpochOrder, explain_repetition
from phalanx.ddp.graph import tensors_in
from phalanx.ddp.mistakes import NUM_STEPS, Observation, decide_warnings
from phalanx.log import get_logger

_logger = get_logger("phalanx.ddp")

_MOST_LOOKS = 1000  # after so many forwards a rank that has left nothing is not waited for
_numbers = itertools.count()  # ranks begin their watches in one order, as they make their modules


class BatchWatch:
    """A `BatchWatch` holds what one rank sees of one module's batches, over the group whose `store` this is.

    Cost: each of the first three steps reads the inputs once more; on rank 0 each later one compares some 256 elements
    of each tensor on the CPU, until the first batches have come again.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        number = next(_numbers)
        self._keys = [f"phalanx/batches/{number}/{other}" for other in range(world_size)]
        self._inputs: list[int | None] = []
        self._order: EpochOrder | None = EpochOrder() if rank == 0 else None
        self._looks = 0  # how often rank 0 has looked for what the others have left
        self._compared = world_size == 1

    def look(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Look at what a forward that trains is given; return False when there is nothing more to look at."""
        tensors = [tensor for tensor in tensors_in((inputs, kwargs)) if tensor.numel()]
        if len(self._inputs) < NUM_STEPS and not self._compared:
            self._inputs.append(_digest(tensors))
            if len(self._inputs) == NUM_STEPS:
                self._store.set(self._keys[self._rank], json.dumps(self._inputs))
        elif self._rank == 0 and not self._compared:
            self._compare()
        if self._order is not None and self._order.repeats(tensors):
            _warn(explain_repetition(self._order.num_steps))
            self._order = None
        done = len(self._inputs) == NUM_STEPS if self._rank else self._compared
        return not (done and self._order is None)

    def compare_no_more(self) -> None:
        """Leave out the comparison with other ranks, whose group is over: its store may not answer any more."""
        self._compared = True

    def _compare(self) -> None:
        """Warn of ranks that get the same batches, once all have left what they got."""
        self._looks += 1
        if self._looks & (self._looks - 1):  # the number is not a power of two
            return
        if self._looks > _MOST_LOOKS:
            self._compared = True
        elif self._store.check(self._keys):
            self._compared = True
            seen = [json.loads(self._store.get(key)) for key in self._keys]
            steps = [
                [Observation(has_inputs=int(one[step] is not None), inputs=one[step] or 0) for one in seen]
                for step in range(NUM_STEPS)
            ]
            for mistake in decide_warnings(steps, ()):
                _warn(mistake.text)


def _digest(tensors: list[Tensor]) -> int | None:
    if not (tensors and all(has_bytes(tensor) for tensor in tensors)):
        return None
    with torch.no_grad():
        return int(digest(digests(tensors, tensors[0].device)))


def _warn(text: str) -> None:
    _logger.warning("torch.nn.parallel.DistributedDataParallel: %s.", text)
