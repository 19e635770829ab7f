"""Add to torch's stores what they lack: a PrefixStore's queues and list of keys, a FileStore's reliable append."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from phalanx._comm.backend.torch_integration.patch import distributed_c10d, patch


def _is_in_file(store: Any) -> bool:
    import torch.distributed as dist

    stores: Any = dist
    while isinstance(store, stores.PrefixStore):
        store = store.underlying_store
    return isinstance(store, stores.FileStore)


@patch(
    "torch.distributed.Store.append",
    "torch.distributed.FileStore",
    "torch.distributed.PrefixStore.underlying_store",
    loses="the store of `phalanx run` may lose values that ranks append to a key, and does not raise DistStoreError",
)
def patch_file_store() -> None:
    """Make FileStore append, delete and fail as TCPStore does, also behind PrefixStores; needed until torch's does.

    `delete_key` returns whether the key existed; if two ranks delete it at once, both may return True.
    """
    import torch.distributed as dist

    stores: Any = dist
    theirs = stores.Store

    @functools.wraps(theirs.append)
    def append(self: Any, key: str, value: str) -> None:
        if _is_in_file(self):
            importlib.import_module("phalanx._comm.backend.store_appends").append(self, key, value)
        else:
            theirs.append(self, key, value)

    @functools.wraps(theirs.delete_key)
    def delete_key(self: Any, key: str) -> Any:
        return (not _is_in_file(self) or self.check([key])) and theirs.delete_key(self, key)

    def raising_store_error(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Any:
            try:
                return method(self, *args)
            except RuntimeError as error:
                if type(error) is not RuntimeError or not _is_in_file(self):
                    raise
                raise stores.DistStoreError(str(error)) from None

        return call

    for store in (stores.FileStore, stores.PrefixStore):
        store.append, store.delete_key = append, delete_key
        for name in ("get", "wait", "multi_get"):
            setattr(store, name, raising_store_error(getattr(theirs, name)))


@patch(
    "torch.distributed.PrefixStore.underlying_store",
    "torch.distributed.PrefixStore.queue_push",
    "torch.distributed.PrefixStore.queue_pop",
    "torch.distributed.PrefixStore.queue_len",
    "torch.distributed.PrefixStore.list_keys",
    loses="a PrefixStore around a Phalanx store has no queues and cannot list keys",
)
def patch_prefix_store() -> None:
    """Add queues and the list of keys to a PrefixStore around one of our stores (a store with `name_through`).

    torch's C++ does not forward these calls to a store that is written in Python; needed until it does.
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
