"""Authenticate the pickles sent between hosts: a changed or replayed pickle is refused before it is unpickled.

Unpickling runs code. Gloo's connections between hosts are neither encrypted nor authenticated, so each pickle
between hosts carries a MAC. The MAC's key is derived from a secret of the group, which the ranks received through the
job's store at the rendezvous. In a job of `phalanx run` on several hosts, the store only accepts processes that have
the job's key.

    message   MAC | number | pickle

A stream is the numbered sequence of messages of one kind from one rank to another, or to all ranks. The MAC covers the
pickle, the stream and the number, so a message is valid at one position only. Pickles are not encrypted, and tensors
have no MAC.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import threading
from collections import Counter
from typing import NamedTuple

from phalanx.errors import PhalanxError

MAC_BYTES = 32
_NUMBER = struct.Struct("<Q")
OVERHEAD_BYTES = MAC_BYTES + _NUMBER.size
"""The number of bytes that a message adds to its pickle."""

EVERYBODY = -1


class PickleStream(NamedTuple):
    """A `PickleStream` names the messages of one `kind` from rank `src` to rank `dst`, or to all ranks of the group."""

    kind: str
    src: int
    dst: int = EVERYBODY

    def __str__(self) -> str:
        return f"{self.kind} from rank {self.src}" + ("" if self.dst == EVERYBODY else f" to rank {self.dst}")


class PickleAuthenticator:
    """A `PickleAuthenticator` is one rank's side of a group's streams: the key, and each stream's message counts."""

    def __init__(self, secret: str, group: str) -> None:
        """Derive the key from `secret`, which only the group's ranks have. `group` is the group's name in errors."""
        self.key = hmac.digest(secret.encode(), b"phalanx pickles between hosts", "sha256")
        self._group = group
        self._lock = threading.Lock()
        self._sent: Counter[PickleStream] = Counter()
        self._received: Counter[PickleStream] = Counter()

    def send(self, pickle: bytes | memoryview, stream: PickleStream) -> bytes:
        """Return the next message of the stream, with MAC and number."""
        return self.sign(pickle, stream, self.count_sent(stream))

    def receive(self, message: bytes | memoryview, stream: PickleStream) -> bytes | memoryview:
        """Return the pickle in the next message of the stream. This raises the same errors as `verify`."""
        return self.verify(message, stream, self.count_received(stream))

    def count_sent(self, stream: PickleStream) -> int:
        """Count one more message to send, and return its number."""
        with self._lock:
            self._sent[stream] += 1
            return self._sent[stream]

    def take_back(self, stream: PickleStream) -> None:
        """Undo the last `count_sent`, because nothing was sent; the next message reuses the number."""
        with self._lock:
            self._sent[stream] -= 1

    def count_received(self, stream: PickleStream) -> int:
        """Count one more message to receive, and return its number."""
        with self._lock:
            self._received[stream] += 1
            return self._received[stream]

    def sign(self, pickle: bytes | memoryview, stream: PickleStream, number: int, index: int = 0) -> bytes:
        """Return the message for `pickle`; `index` distinguishes several messages with the same number."""
        packed = _NUMBER.pack(number)
        return self._mac(pickle, stream, packed, index) + packed + pickle

    def verify(
        self, message: bytes | memoryview, stream: PickleStream, number: int, index: int = 0
    ) -> bytes | memoryview:
        """Return the pickle in the expected message: the one with this `number` and `index`.

        Raises:
            PhalanxError: no rank of the group sent this message, or a rank sent it for another position; its pickle was
                not read. If earlier messages are missing, the message after this one is expected next.
        """
        mac, packed, pickle = message[:MAC_BYTES], message[MAC_BYTES:OVERHEAD_BYTES], message[OVERHEAD_BYTES:]
        if not hmac.compare_digest(mac, self._mac(pickle, stream, packed, index)):
            raise PhalanxError(
                f"group {self._group!r}: a pickled object ({stream}) arrived from another host with a wrong MAC: no "
                "rank of this group sent it in this form. It was not unpickled.\n"
                "Its bytes were changed in transit, or somebody without the group's key sent it. Gloo's connections "
                "between hosts are not authenticated: use a private network (`phalanx docs security`)."
            )
        found = _NUMBER.unpack(packed)[0]
        if found < number:
            raise PhalanxError(
                f"group {self._group!r}: a pickled object ({stream}) has sequence number {found}; {number} was "
                "expected. It was not unpickled.\n"
                "It has arrived before: somebody on the network may be replaying it. Gloo's connections between hosts "
                "are not authenticated: use a private network (`phalanx docs security`)."
            )
        if found > number:
            with self._lock:
                self._received[stream] = max(self._received[stream], found)
            raise PhalanxError(
                f"group {self._group!r}: a pickled object ({stream}) has sequence number {found}; {number} was "
                f"expected. It was not unpickled; {found + 1} is expected next.\n"
                "Either an earlier call raised an exception, on this rank before it received or on the sender before "
                "it sent: look for the first error on each. Or an object was dropped in transit "
                "(`phalanx docs security`)."
            )
        return pickle

    def _mac(self, pickle: bytes | memoryview, stream: PickleStream, number: bytes | memoryview, index: int) -> bytes:
        head = f"{len(stream.kind)} {stream.kind} {stream.src} {stream.dst} {index} ".encode()
        mac = hashlib.blake2b(head, key=self.key, digest_size=MAC_BYTES)
        mac.update(number)
        mac.update(pickle)
        return mac.digest()
