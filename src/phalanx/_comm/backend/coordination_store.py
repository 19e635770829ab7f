"""`CoordinationStore` is c10d's `Store` over the job's coordinator, for rendezvous of ranks on several hosts.

Ranks of one host exchange data faster, in shared memory (`phalanx._comm.rendezvous.bootstrap`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed import Store

from phalanx._comm.control.client import Client, PendingGet
from phalanx._comm.control.key import Key
from phalanx.errors import CoordinationError, DeadlineError

P = ParamSpec("P")
R = TypeVar("R")

_DEFAULT_TIMEOUT = timedelta(seconds=300)  # as in PyTorch's stores

# torch's C++ does not keep a store's Python object alive; this set does.
_open_stores: set[CoordinationStore] = set()


def _in_torchs_words(
    method: Callable[Concatenate[CoordinationStore, P], R],
) -> Callable[Concatenate[CoordinationStore, P], R]:
    """Convert the errors of `method` to those of PyTorch's stores, which callers catch."""

    @functools.wraps(method)
    def call(self: CoordinationStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except DeadlineError as error:
            raise dist.DistStoreError(str(error)) from None
        except CoordinationError as error:
            raise dist.DistNetworkError(str(error)) from error

    return call


class CoordinationStore(Store):
    """A `CoordinationStore` is a PyTorch `Store` on the coordinator at `address`. Threads and forks may share it.

    A waiting call does not delay other threads' calls; clones share one connection. The connection stays open until
    `close`, or the end of the process: torch does not report when it no longer needs a store. A PrefixStore around this
    store supports queues in a rank of `phalanx run`, and elsewhere once a group of ours is created.

    Raises:
        AuthenticationError, CoordinationError, DeadlineError: as `Client`. The methods raise TCPStore's errors:
            `torch.distributed.DistStoreError` for a key that is not set in time, and `DistNetworkError`.
    """

    wait_is_interruptible = True
    """Whether Ctrl-C interrupts a wait, and a timed-out wait prints nothing. If so, callers need not poll."""

    if TYPE_CHECKING:
        timeout: timedelta  # missing in torch's stub

    def __init__(
        self,
        address: str,
        key: Key | None = None,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        *,
        client: Client | None = None,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)  # stored in the base class, where a PrefixStore around this store sets it, too
        self._client = Client(address, key) if client is None else client
        self._captured = threading.local()
        _open_stores.add(self)

    @property
    def host(self) -> str:
        """Return the coordinator's host, as TCPStore does; "" if its address is a Unix socket of this host."""
        return self._client.address.host

    @property
    def port(self) -> int:
        """Return the coordinator's port, as TCPStore does; 0 if its address is a Unix socket of this host."""
        return self._client.address.port

    def leads_to(self, address: str) -> bool:
        """Return whether this is an open connection to the coordinator at `address`."""
        return not self._client.is_closed and str(self._client.address) == address

    def begin_get(self, key: str) -> PendingGet:
        """Request the value of `key` without waiting, and return the pending request."""
        return self._client.begin_get(key)

    def close(self) -> None:
        """Close the connection to the coordinator, for all clones as well."""
        _open_stores.difference_update([store for store in _open_stores if store._client is self._client])
        self._client.close()

    @_in_torchs_words
    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(key, value)

    @_in_torchs_words
    def get(self, key: str) -> bytes:
        return self._client.get(key, self.timeout)

    @_in_torchs_words
    def add(self, key: str, value: int) -> int:
        return self._client.add(key, value)

    @_in_torchs_words
    def add_item(self, counter: str, prefix: str, value: str | bytes) -> int:
        """Set the key `prefix` + n to `value`, where n is the number at `counter`; add one to it, and return n."""
        return self._client.add_item(counter, prefix, value)

    @_in_torchs_words
    def read_and_check(self, key: str, checked: str) -> tuple[bytes, bool]:
        """Return the value of `key`, set to "" if missing, and whether `checked` exists, in one round trip."""
        return self._client.read_and_check(key, checked)

    @_in_torchs_words
    def check(self, keys: Sequence[str]) -> bool:
        if (captured := getattr(self._captured, "keys", None)) is not None:
            captured += keys
            return False
        return self._client.check(keys)

    @_in_torchs_words
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._client.wait(keys, self.timeout if timeout is None else timeout)

    @_in_torchs_words
    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set `key` to the desired value if its value is the expected value; return the value afterwards."""
        return self._client.compare_set(key, expected_value, desired_value)

    @_in_torchs_words
    def append(self, key: str, value: str | bytes) -> None:
        self._client.append(key, value)

    @_in_torchs_words
    def delete_key(self, key: str) -> bool:
        return self._client.delete_key(key)

    @_in_torchs_words
    def delete_prefix(self, prefix: str) -> int:
        """Delete the keys that start with `prefix`, and return their number."""
        return self._client.delete_prefix(prefix)

    @_in_torchs_words
    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until `world_size` calls have been made with this `key`."""
        self._client.barrier(key, world_size, self.timeout if timeout is None else timeout)

    @_in_torchs_words
    def num_keys(self) -> int:
        return self._client.num_keys()

    @_in_torchs_words
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all `keys` exist, and return their values."""
        return self._client.multi_get(keys, self.timeout)

    @_in_torchs_words
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise dist.DistStoreError(f"multi_set: got {len(keys)} keys and {len(values)} values")
        self._client.multi_set(keys, values)

    @_in_torchs_words
    def queue_push(self, key: str, value: str | bytes) -> None:
        self._client.queue_push(key, value)

    @_in_torchs_words
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Pop the oldest item of the queue `key`.

        Raises:
            QueueEmptyError: the queue is empty, and `block` is False.
            DistStoreError: there was no item in time.
        """
        item = self._client.queue_pop(key, block, self.timeout)
        if item is None:
            raise dist.QueueEmptyError(f"queue {key!r} is empty")
        return item

    @_in_torchs_words
    def queue_len(self, key: str) -> int:
        """Return the length of the queue `key`."""
        return self._client.queue_len(key)

    @_in_torchs_words
    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`; by default all keys."""
        return self._client.list_keys(prefix)

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` are supported."""
        return True

    def clone(self) -> CoordinationStore:
        """Return another store of the same keys, with its own timeout."""
        return CoordinationStore(str(self._client.address), timeout=self.timeout, client=self._client)

    # torch's C++ calls these through a PrefixStore.
    getNumKeys = num_keys
    deleteKey = delete_key

    def name_through(self, store: Store, key: str) -> str:
        """Return the full name of `key` in `store`, a PrefixStore around this store, without sending anything."""
        self._captured.keys = []
        try:
            store.check([key])
            return str(self._captured.keys[0])
        finally:
            self._captured.keys = None
