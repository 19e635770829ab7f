"""Pickles that travel between hosts: who has changed one on the way is found out before any of it is read.

Reading a pickle runs code. Gloo's connections between hosts are neither encrypted nor authenticated, so each pickle
carries a MAC there, made with a key of the group: it follows from a secret that its ranks were told when they met, in
the job's store. Of a job of `phalanx run` on several hosts, the store lets in only who knows the job's key.

Each way in which pickles are sent has a `purpose` of its own, so that the bytes of one are no message of another. The
MAC doesn't hide what is sent and doesn't cover tensors, and a message may be played back where its purpose is the same.
"""

from __future__ import annotations

import hashlib
import hmac

from phalanx.errors import PhalanxError

MAC_BYTES = 32


def derive_pickle_key(secret: str) -> bytes:
    """Return the key of a group whose ranks share `secret`."""
    return hmac.digest(secret.encode(), b"phalanx pickles between hosts", "sha256")


def authenticate(sent: bytes, key: bytes, purpose: str) -> bytes:
    """Return what to send: a MAC and `sent`; the latter alone where there is no key, in the memory of one host."""
    return _mac(sent, key, purpose) + sent if key else sent


def verify(received: bytes | memoryview, key: bytes, purpose: str, group: str) -> bytes | memoryview:
    """Return what was sent for this purpose; `group` is its name in messages.

    Raises:
        PhalanxError: it is not what a rank of the group has sent. Nothing of it was read.
    """
    if not key:
        return received
    mac, sent = received[:MAC_BYTES], received[MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(sent, key, purpose)):
        raise PhalanxError(
            f"group {group!r}: a pickled object came from another host with a wrong MAC, so that no rank of this group "
            "has sent it as it is; nothing of it was read.\n"
            "Its bytes were changed on the way, or somebody without the group's key has sent it. Gloo's connections "
            "between hosts are not authenticated: use a network that is yours alone (docs/security.md)."
        )
    return sent


def _mac(sent: bytes | memoryview, key: bytes, purpose: str) -> bytes:
    mac = hashlib.blake2b(f"{len(purpose)} {purpose}".encode(), key=key, digest_size=MAC_BYTES)
    mac.update(sent)
    return mac.digest()
