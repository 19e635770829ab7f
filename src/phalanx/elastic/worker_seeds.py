"""Seed DataLoader workers by the batch, so that a worker that is started again draws the same numbers."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from phalanx._comm.backend.torch_integration.data_loaders import call_before_fetch


def seed_workers(loader: Any, seed: int, epoch: int) -> None:
    """Make what the workers of `loader` draw for a batch follow from the seed, the epoch and the batch's first index.

    It does not depend on what a worker has done before, nor on which rank or worker makes the batch. PyTorch seeds a
    worker once, when it is started: one that is started in the middle of an epoch would draw there what the first had
    drawn at its begin.
    """
    if loader.num_workers == 0:
        return
    if not isinstance(loader.worker_init_fn, _SeedBatches):
        loader.worker_init_fn = _SeedBatches(seed, loader.worker_init_fn)
    loader.worker_init_fn.epoch = epoch


class _SeedBatches:
    """This `worker_init_fn` calls that of the user, too."""

    def __init__(self, seed: int, then: Callable[[int], None] | None) -> None:
        self._seed, self._then = seed, then
        # Workers of `persistent_workers` see it change, forked or not.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch.fill_(number)

    def __call__(self, worker: int) -> None:
        if self._then is not None:
            self._then(worker)
        call_before_fetch(self._seed_batch)

    def _seed_batch(self, indices: Any) -> None:
        first = indices[0] if isinstance(indices, (list, tuple)) and indices else indices
        text = f"{self._seed} {self.epoch} {first}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            import numpy as np

            np.random.seed(number % (1 << 32))
