"""Observe DataLoaders for samplers and elastic jobs: which iterator is in use, and when a worker reads a batch."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from phalanx._comm.backend.torch_integration.late_modules import call_once_imported
from phalanx._comm.backend.torch_integration.patch import patch

_LoaderListener = tuple[Callable[[Any, Any], None], Callable[[Any, Any, Any, bool], None]]
_loader_listeners: weakref.WeakKeyDictionary[Any, _LoaderListener] = weakref.WeakKeyDictionary()


def observe_loaders(
    owner: Any, before: Callable[[Any, Any], None], listener: Callable[[Any, Any, Any, bool], None]
) -> None:
    """Call `before(owner, loader)` and `listener(owner, loader, iterator, is_new)` whenever a DataLoader is iterated.

    The first call precedes the creation of the iterator, and the second follows it; in between, workers may already
    read indices. The calls end when `owner` no longer exists.
    """
    _loader_listeners[owner] = before, listener
    _observe_loaders()


@patch(
    "torch.utils.data.DataLoader.__iter__(self)",
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    loses="batches that DataLoader workers have prefetched count as used, in elastic jobs and in a saved sampler",
)
def _observe_loaders() -> None:
    from torch.utils.data import DataLoader

    _observe_kind(DataLoader)
    # torchdata's DataLoader has its own `__iter__`.
    call_once_imported(
        "torchdata.stateful_dataloader.stateful_dataloader",
        lambda: _observe_kind(sys.modules["torchdata.stateful_dataloader.stateful_dataloader"].StatefulDataLoader),
    )


def _observe_kind(kind: Any) -> None:
    original = kind.__iter__

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:
        kept = getattr(self, "_iterator", None)
        for owner, (before, _) in list(_loader_listeners.items()):
            before(owner, self)
        iterator = original(self)
        for owner, (_, listener) in list(_loader_listeners.items()):
            listener(owner, self, iterator, kept is None)
        return iterator

    kind.__iter__ = __iter__


@patch(
    "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch(self, possibly_batched_index)",
    loses="random numbers in a DataLoader's workers depend on the worker, and differ after the job has shrunk",
)
def call_before_fetch(function: Callable[[Any], None]) -> None:
    """Call `function(indices)` in this process, a DataLoader's worker, before a batch of them is read."""
    from torch.utils.data._utils import fetch

    fetcher: Any = fetch._MapDatasetFetcher
    original = fetcher.fetch

    @functools.wraps(original)
    def seeded(self: Any, indices: Any) -> Any:
        function(indices)
        return original(self, indices)

    fetcher.fetch = seeded
