"""Pickles that travel between hosts: who has changed one on the way is found out before any of it is read.

Reading a pickle runs code. Gloo's connections between hosts are neither encrypted nor authenticated, so each pickle
carries a MAC there, made with a key of the group: it follows from a secret that its ranks were told when they met, in
the job's store. Of a job of `phalanx run` on several hosts, the store lets in only who knows the job's key.

It doesn't hide what is sent, it doesn't cover tensors, and a message of the same group may be played back.
"""

from __future__ import annotations

import hashlib
import hmac

from phalanx.errors import PhalanxError

MAC_BYTES = 32


def derive_pickle_key(secret: str) -> bytes:
    """Return the key of a group whose ranks share `secret`."""
    return hmac.digest(secret.encode(), b"phalanx pickles between hosts", "sha256")


def authenticate(pickled: bytes, key: bytes) -> bytes:
    """Return what to send: a MAC and the pickle; the pickle alone where there is no key, in the memory of one host."""
    return _mac(pickled, key) + pickled if key else pickled


def verify(received: bytes | memoryview, key: bytes, group: str) -> bytes | memoryview:
    """Return the pickle that was received; `group` is its name in messages.

    Raises:
        PhalanxError: it is not what a rank of the group has sent. Nothing of it was read.
    """
    if not key:
        return received
    mac, pickled = received[:MAC_BYTES], received[MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(pickled, key)):
        raise PhalanxError(
            f"group {group!r}: a pickled object came from another host with a wrong MAC, so that no rank of this group "
            "has sent it as it is; nothing of it was read.\n"
            "Its bytes were changed on the way, or somebody without the group's key has sent it. Gloo's connections "
            "between hosts are not authenticated: use a network that is yours alone (docs/security.md)."
        )
    return pickled


def _mac(pickled: bytes | memoryview, key: bytes) -> bytes:
    return hashlib.blake2b(pickled, key=key, digest_size=MAC_BYTES).digest()
