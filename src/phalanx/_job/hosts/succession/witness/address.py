"""Parse a witness's address, the value of `--witness`: a coordinator or an etcd."""

from __future__ import annotations

import re

from phalanx._job.coordinator.rendezvous import join_endpoint, split_endpoint

_KINDS = "HOST:PORT or etcd://HOST:PORT"
_SCHEMES = ("", "etcd", "etcds")


def is_etcd(address: str) -> bool:
    """Return whether an address leads to an etcd: etcd://HOST:PORT, or etcds:// with TLS."""
    return address.partition("://")[0] in ("etcd", "etcds")


def split_etcd(address: str) -> tuple[bool, str, str, int]:
    """Return whether etcd://USER@HOST:PORT or etcds://USER@HOST:PORT has TLS, its user or "", its host and port.

    Raises:
        ValueError: the address is invalid; the message does not repeat a password.
    """
    scheme, _, rest = address.partition("://")
    user, _, place = rest.rpartition("@")
    if ":" in user:
        raise ValueError(
            "has a password, which everybody on this host can read there. Give etcd://USER@HOST:PORT, and the "
            "password in ETCDCTL_PASSWORD, or in a file that PHALANX_WITNESS_PASSWORD_FILE names"
        )
    host, port = split_endpoint(place.rstrip("/"), 0)
    if not port:
        raise ValueError(f"must be {_KINDS}, with a port, got {address!r}")
    return scheme == "etcds", user, host, port


def read_witness(address: str) -> str:
    """Return the witness's address in the form that all hosts of the job receive.

    Raises:
        ValueError: the address is invalid.
    """
    scheme, colon, place = address.rpartition("://")
    if scheme not in _SCHEMES or (colon and not scheme):
        raise ValueError(f"must be {_KINDS}, got {re.sub('//.*@', '//…@', address)!r}")
    if scheme:
        _, user, host, port = split_etcd(address)
        return f"{scheme}://{user}{'@' * bool(user)}{join_endpoint(host, port)}"
    host, port = split_endpoint(place, 0)
    if not port:
        raise ValueError(f"must be {_KINDS}, with a port, got {address!r}")
    return join_endpoint(host, port)
