"""c10d's `Store` over the job's coordinator: what ranks meet in where the job has several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.coordination.client import Client
from phalanx.coordination.key import Key
from phalanx.errors import DeadlineError

_DEFAULT_TIMEOUT = timedelta(seconds=300)  # as that of PyTorch's stores


class CoordinationStore(Store):
    """PyTorch's Store, whose keys lie in the coordinator at `address`. Threads may share it, and so may a fork.

    Errors are those of TCPStore: `torch.distributed.DistStoreError` where a key does not come in time.

    Raises:
        AuthenticationError, CoordinationError, DeadlineError: as `Client`.
    """

    def __init__(self, address: str, key: Key | None = None, timeout: timedelta = _DEFAULT_TIMEOUT) -> None:
        super().__init__()
        self._timeout = timeout
        self._client = Client(address, key, timeout=timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Let `key` have `value`."""
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until it is there."""
        try:
            return self._client.get(key, self._timeout)
        except DeadlineError as error:
            raise dist.DistStoreError(str(error)) from None

    def add(self, key: str, value: int) -> int:
        """Add to the number at `key`; the sum."""
        return self._client.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are there."""
        return self._client.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of `keys` are there."""
        try:
            self._client.wait(keys, self._timeout if timeout is None else timeout)
        except DeadlineError as error:
            raise dist.DistStoreError(str(error)) from None

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Let `key` have the desired value if it has the expected one; what it has then."""
        return self._client.compare_set(key, expected_value, desired_value)

    def append(self, key: str, value: str | bytes) -> None:
        """Let the value of `key` end with `value`."""
        self._client.append(key, value)

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return self._client.delete_key(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._client.num_keys()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`; waits until all are there."""
        try:
            return self._client.multi_get(keys, self._timeout)
        except DeadlineError as error:
            raise dist.DistStoreError(str(error)) from None

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Let each key have its value."""
        self._client.multi_set(keys, values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append to the queue `key`."""
        self._client.queue_push(key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """The oldest item of the queue `key`.

        Raises:
            QueueEmptyError: there is none, and `block` is False.
            DistStoreError: none came in time.
        """
        try:
            item = self._client.queue_pop(key, block, self._timeout)
        except DeadlineError as error:
            raise dist.DistStoreError(str(error)) from None
        if item is None:
            raise dist.QueueEmptyError(f"queue {key!r} is empty")
        return item

    def queue_len(self, key: str) -> int:
        """How many items are in the queue `key`."""
        return self._client.queue_len(key)

    def list_keys(self) -> list[str]:
        """All keys."""
        return self._client.list_keys()

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are there."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """How long calls wait from now on."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long calls wait."""
        return self._timeout

    def clone(self) -> CoordinationStore:
        """Another connection to the same keys."""
        return CoordinationStore(str(self._client.address), self._client.key, self._timeout)
