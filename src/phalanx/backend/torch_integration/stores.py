"""Give torch's stores queues and lists of keys, where its C++ has none or does not pass them on to Python."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from phalanx.backend.torch_integration.patch import distributed_c10d, patch


@patch(
    "torch.distributed.Store.queue_push",
    "torch.distributed.Store.queue_pop",
    "torch.distributed.Store.queue_len",
    "torch.distributed.FileStore",
    "torch.distributed.PrefixStore.underlying_store",
    loses="the store of `phalanx run` has no queues",
)
def serve_queues() -> None:
    """Let a FileStore, by itself or behind prefixes, have queues; ends when torch's has them."""
    import torch.distributed as dist

    stores: Any = dist
    theirs = stores.Store

    def in_file(store: Any) -> bool:
        while isinstance(store, stores.PrefixStore):
            store = store.underlying_store
        return isinstance(store, stores.FileStore)

    def module() -> ModuleType:
        return importlib.import_module("phalanx.backend.store_queues")

    @functools.wraps(theirs.queue_push)
    def queue_push(self: Any, key: str, value: str) -> None:
        module().push(self, key, value) if in_file(self) else theirs.queue_push(self, key, value)

    @functools.wraps(theirs.queue_pop)
    def queue_pop(self: Any, key: str, block: bool = True) -> Any:
        return module().pop(self, key, self.timeout, block) if in_file(self) else theirs.queue_pop(self, key, block)

    @functools.wraps(theirs.queue_len)
    def queue_len(self: Any, key: str) -> Any:
        return module().length(self, key) if in_file(self) else theirs.queue_len(self, key)

    for store in (stores.FileStore, stores.PrefixStore):
        store.queue_push, store.queue_pop, store.queue_len = queue_push, queue_pop, queue_len


@patch(
    "torch.distributed.PrefixStore.underlying_store",
    "torch.distributed.PrefixStore.queue_push",
    "torch.distributed.PrefixStore.queue_pop",
    "torch.distributed.PrefixStore.queue_len",
    "torch.distributed.PrefixStore.list_keys",
    loses="a PrefixStore around a store of ours has no queues and no list of keys",
)
def serve_prefixes() -> None:
    """Let a PrefixStore around a store of ours (one that has `name_through`) have queues and a list of keys.

    torch's C++ passes neither on to a store that is written in Python; ends when it does.
    """
    prefixed: Any = distributed_c10d().PrefixStore

    def extend(name: str, ours: Callable[..., Any]) -> None:
        theirs = getattr(prefixed, name)

        @functools.wraps(theirs)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            store = self
            while isinstance(store, prefixed):
                store = store.underlying_store
            return (
                ours(store, self, *args, **kwargs) if hasattr(store, "name_through") else theirs(self, *args, **kwargs)
            )

        setattr(prefixed, name, call)

    def list_keys(store: Any, self: Any) -> list[str]:
        prefix = store.name_through(self, "")
        return [key[len(prefix) :] for key in store.list_keys(prefix)]

    extend("queue_push", lambda store, self, key, value: store.queue_push(store.name_through(self, key), value))
    extend("queue_pop", lambda store, self, key, block=True: store.queue_pop(store.name_through(self, key), block))
    extend("queue_len", lambda store, self, key: store.queue_len(store.name_through(self, key)))
    extend("list_keys", list_keys)
