"""A job's `Key` authenticates the job's processes to the coordinator, and the coordinator to them.

A key is 32 random bytes, shown as 52 characters: `plx-`, then base64 of the bytes and their checksum, so that a
truncated key is not mistaken for another job's key. Two CURVE key pairs are derived from it, one for the coordinator
and one for the members. The key and the secret halves of the pairs are never sent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from dataclasses import dataclass, field

_PREFIX = "plx-"
_BYTES = 32
_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class CurvePair:
    """A CURVE key pair in ZeroMQ's Z85 encoding."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Key:
    """A `Key` is a job's key. `str` shows the key itself; `repr` shows only a fingerprint for comparing keys."""

    raw: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.raw) != _BYTES:
            raise ValueError(f"a key has {_BYTES} bytes, got {len(self.raw)}")

    @classmethod
    def generate(cls) -> Key:
        """Return a new key from the operating system's random source."""
        return cls(os.urandom(_BYTES))

    @classmethod
    def parse(cls, text: str) -> Key:
        """Parse a key in the form that `str(key)` returns.

        Raises:
            ValueError: `text` is not a key; the message says why and does not repeat the text.
        """
        text = text.strip()
        if not text.startswith(_PREFIX):
            raise ValueError(f"a key starts with {_PREFIX!r}, but this text does not; `phalanx key` creates a key")
        try:
            data = base64.urlsafe_b64decode(text[len(_PREFIX) :].encode("ascii"))
        except (binascii.Error, UnicodeEncodeError):
            data = b""
        raw, checksum = data[:_BYTES], data[_BYTES:]
        if len(data) != _BYTES + _CHECKSUM_BYTES or not hmac.compare_digest(checksum, _checksum(raw)):
            raise ValueError(
                f"the key is damaged: it has {len(text)} of {len(str(cls(bytes(_BYTES))))} characters, or "
                "a wrong character; copy it again"
            )
        return cls(raw)

    @property
    def fingerprint(self) -> str:
        """Return eight hex digits that identify the key without revealing it."""
        return hashlib.blake2b(self.raw, digest_size=4, person=b"plx-fingerprint").hexdigest()

    def coordinator_pair(self) -> CurvePair:
        """Return the key pair with which the coordinator proves that it knows the key."""
        return self._pair(b"plx-coordinator")

    def member_pair(self) -> CurvePair:
        """Return the key pair with which every other process proves that it knows the key."""
        return self._pair(b"plx-member")

    def reach_secret(self) -> bytes:
        """Return the secret with which a host signs a client's nonce, to prove only that it belongs to the job."""
        return self._derive(b"plx-reach")

    def _derive(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(b"", digest_size=32, key=self.raw, person=purpose).digest()

    def _pair(self, purpose: bytes) -> CurvePair:
        import zmq
        from zmq.utils import z85

        secret = z85.encode(self._derive(purpose))
        return CurvePair(zmq.curve_public(secret), secret)

    def __str__(self) -> str:
        return _PREFIX + base64.urlsafe_b64encode(self.raw + _checksum(self.raw)).decode()

    def __repr__(self) -> str:
        return f"Key(fingerprint={self.fingerprint!r})"


def _checksum(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=_CHECKSUM_BYTES, person=b"plx-checksum").digest()
