"""The `Client` of the coordinator: keys and values, membership, messages and events."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from phalanx._base.deadline import Deadline
from phalanx._comm.control.connection import Timeout
from phalanx._comm.control.member_connection import MemberConnection
from phalanx._comm.control.pending_call import PendingCall, Request
from phalanx._comm.control.wire import MAX_VALUE_BYTES, Op, pack_number
from phalanx.errors import DeadlineError

_BUSY_PAUSE_S, _TRY_S = 0.005, 5.0
_MAX_PART = 4096  # the maximum number of fields in a request


class Client(MemberConnection):
    """A `Client` sends requests to the coordinator. Any number of threads may use it at once.

    The constructor takes the same arguments and raises the same errors as `Connection`.
    """

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Keys and values, as in c10d's Store.

    def set(self, key: str, value: str | bytes) -> None:
        self._call(Op.SET, _name(key), _bytes(value))

    def get(self, key: str, timeout: Timeout = None) -> bytes:
        return self._call(Op.GET, _name(key), deadline=self._deadline(timeout), waits_for=(key,))[0]

    def begin_get(self, key: str) -> PendingGet:
        """Request the value of `key`, without waiting for it."""
        return PendingGet(self, self._send_request(Op.GET, _name(key), deadline=self._deadline(None)))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the integer at `key`, and return the sum; a missing key counts as zero."""
        return int(self._call(Op.ADD, _name(key), pack_number(amount))[0])

    def add_item(self, counter: str, prefix: str, value: str | bytes) -> int:
        """Atomically set the key `prefix` + n to `value`, where n is the number at `counter`, and increment `counter`.

        Return n; a missing counter counts as zero.
        """
        return int(self._call(Op.ADD_ITEMS, _name(counter), _name(prefix), _bytes(value))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` to `desired` if its value is `expected`; a missing key counts as empty. Return the resulting value.

        As in TCPStore: if the key is missing and `expected` is not empty, return `expected`.
        """
        return self._call(Op.COMPARE_SET, _name(key), _bytes(expected), _bytes(desired))[0]

    def read_and_check(self, key: str, checked: str) -> tuple[bytes, bool]:
        """Return the value of `key`, and whether the key `checked` exists. A missing `key` is set to "".

        Cost: one round trip with two requests; a host's relay combines the identical requests of its ranks.
        """
        deadline = self._deadline(None)
        requests = [(Op.COMPARE_SET, (_name(key), b"", b"")), (Op.CHECK, (_name(checked),))]
        value, is_there = (call.result(self._where)[0] for call in self._call_all(requests, deadline))
        return value, is_there == b"1"

    def _call_all(self, requests: Sequence[Request], deadline: Deadline) -> list[PendingCall]:
        """Send the requests in one frame, and return the completed calls.

        Raises:
            DeadlineError: not all of them were answered in time.
        """
        calls = self._send_requests(requests, deadline)
        with contextlib.ExitStack() as ends:
            for call in calls:
                ends.callback(self._release_call, call)
            for call in calls:
                self._await(call, deadline)
        if not all(call.is_over for call in calls):
            raise self._late(deadline, ())
        return calls

    def append(self, key: str, value: str | bytes) -> None:
        self._call(Op.APPEND, _name(key), _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._call(Op.CHECK, *part)[0] == b"1" for part in _parts([_name(key) for key in keys], 1))

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        deadline = self._deadline(timeout)
        for part in _parts([_name(key) for key in keys], 1):
            self._call(Op.WAIT, *part, deadline=deadline, waits_for=keys)

    def delete_key(self, key: str) -> bool:
        return self._call(Op.DELETE, _name(key))[0] == b"1"

    def num_keys(self) -> int:
        return int(self._call(Op.NUM_KEYS)[0])

    def multi_get(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        """Wait until all `keys` exist, and return their values."""
        deadline = self._deadline(timeout)
        values: list[bytes] = []
        for part in _parts([_name(key) for key in keys], 1):
            while part:
                found = self._call(Op.MULTI_GET, *part, deadline=deadline, waits_for=keys)
                values += found
                part = part[len(found) :]
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set: got {len(keys)} keys and {len(values)} values")
        fields = [part for key, value in zip(keys, values, strict=True) for part in (_name(key), _bytes(value))]
        for part in _parts(fields, 2):
            self._call(Op.MULTI_SET, *part)

    def barrier(self, key: str, size: int, timeout: Timeout = None) -> None:
        """Wait until `barrier` has been called `size` times with this `key`, whose value counts the calls."""
        deadline = self._deadline(timeout)
        self._call(Op.BARRIER, _name(key), pack_number(size), deadline=deadline, waits_for=(key,))

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._call(Op.QUEUE_PUSH, _name(key), _bytes(value))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout = None) -> bytes | None:
        """Pop the oldest item of the queue `key`; without `block`, return None if the queue is empty."""
        deadline = self._deadline(timeout)
        found = self._call(
            Op.QUEUE_POP, _name(key), b"1" if block else b"0", deadline=deadline, waits_for=(key,) if block else ()
        )
        return found[0] if found else None

    def queue_len(self, key: str) -> int:
        """Return the length of the queue `key`."""
        return int(self._call(Op.QUEUE_LEN, _name(key))[0])

    def list_keys(self, prefix: str = "") -> list[str]:
        return [key.decode() for key in self._call(Op.LIST_KEYS, _name(prefix))]

    def delete_prefix(self, prefix: str) -> int:
        """Delete the keys that start with `prefix`, and return their number."""
        return int(self._call(Op.DELETE_PREFIX, _name(prefix))[0])

    # Membership.

    def expel(self, member: int, why: str) -> None:
        """Remove another member from the job; the members are notified that it is lost."""
        self._call(Op.LEAVE, pack_number(member), why.encode())

    def members(self) -> dict[int, dict[str, Any]]:
        """Return the facts of all members, by member number."""
        found: dict[int, dict[str, Any]] = {}
        start = 0
        while page := self._call(Op.MEMBERS, pack_number(start)):
            found.update((int(number), json.loads(facts)) for number, facts in zip(page[::2], page[1::2], strict=True))
            start = max(found) + 1
        return found

    def post(self, to: int, body: bytes, timeout: Timeout = None) -> None:
        """Send a message to member `to`, or to all other members if `to` is -1; wait while a receiver's outbox is full.

        Raises:
            ValueError: there is no such member, or it has left.
            DeadlineError: the outbox was still full when the time ran out, or the coordinator did not answer.
        """
        deadline = self._deadline(timeout)
        # Each attempt must wait for its answer, which the coordinator sends at once unless the network is cut.
        each_s = max(deadline.left_s, _TRY_S)

        def is_accepted() -> bool:
            return self._call(Op.POST, pack_number(to), body, deadline=Deadline.after(each_s)) != [b"busy"]

        if not deadline.wait_until(is_accepted, _BUSY_PAUSE_S):
            raise DeadlineError(
                f"{self._where}: member {to} has not received its earlier messages within {deadline.timeout_s:.1f} s."
            )

    def post_all(self, messages: Sequence[tuple[int, bytes]], timeout: Timeout = None) -> list[int]:
        """Send at most `MAX_MESSAGES` messages in one frame, each to the given member, or to all others if that is -1.

        Return the indices of the messages for which a receiver's outbox was full; post these again. A message that is
        too long, or whose receiver does not exist, is dropped.

        Raises:
            ValueError: the messages together are too long for a frame.
            DeadlineError: not all of them were answered in time; some may have been posted.
            CoordinationError: the connection failed, or this process is not a member.
        """
        deadline = self._deadline(timeout)
        calls = self._call_all([(Op.POST, (pack_number(to), body)) for to, body in messages], deadline)
        return [place for place, call in enumerate(calls) if self._is_busy(call)]

    def _is_busy(self, call: PendingCall) -> bool:
        try:
            return call.result(self._where) == [b"busy"]
        except ValueError:  # the receiver does not exist
            return False


class PendingGet:
    """A `PendingGet` is a `get` that waits in the coordinator while its caller polls.

    The caller must call `cancel`, whether the value has arrived or not.
    """

    def __init__(self, client: Client, call: PendingCall) -> None:
        self._client = client
        self._call: PendingCall | None = call

    def poll(self) -> bytes | None:
        """Return the value, or None if it has not arrived; wait at most a millisecond.

        Raises:
            CoordinationError: the connection failed.
            ClosedError: the client was closed.
        """
        assert self._call is not None
        self._client._try_read(self._call)
        return self._call.result(self._client._where)[0] if self._call.is_over else None

    def wait(self, timeout: Timeout) -> bytes | None:
        """Wait for the value and return it, or None after `timeout`.

        Raises:
            CoordinationError, ClosedError: as for `poll`.
        """
        assert self._call is not None
        self._client._await(self._call, Deadline.after(timeout))
        return self._call.result(self._client._where)[0] if self._call.is_over else None

    def cancel(self) -> None:
        """Cancel the request. A second call does nothing."""
        call, self._call = self._call, None
        if call is not None:
            self._client._release_call(call)


def _name(key: str) -> bytes:
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, got {type(key).__name__}")
    return key.encode()


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"a value must be a str or bytes, got {type(value).__name__}")
    return bytes(value)


def _parts(fields: list[bytes], step: int) -> Iterator[list[bytes]]:
    """Split `fields`, at multiples of `step`, into parts that each fit in a request; if empty, yield one empty part."""
    part: list[bytes] = []
    size = 0
    for at in range(0, len(fields), step):
        group = fields[at : at + step]
        grows = sum(map(len, group))
        if part and (size + grows > MAX_VALUE_BYTES or len(part) >= _MAX_PART):
            yield part
            part, size = [], 0
        part += group
        size += grows
    if part or not fields:
        yield part
