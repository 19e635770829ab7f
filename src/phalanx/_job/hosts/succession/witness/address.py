"""Parse a witness's address, the value of `--witness`: a coordinator or an etcd."""

from __future__ import annotations

import re

from phalanx._job.coordinator.rendezvous import join_endpoint, split_endpoint

_KINDS = "HOST:PORT or etcd://HOST:PORT"
_SCHEMES = ("", "etcd", "etcds")
NO_USERS = "logging in to etcd is not supported: use etcd client certificates instead, or `phalanx coordinator`"


def is_etcd(address: str) -> bool:
    """Return whether an address is that of an etcd server: etcd://HOST:PORT, or etcds:// with TLS."""
    return address.partition("://")[0] in ("etcd", "etcds")


def split_etcd(address: str) -> tuple[bool, str, int]:
    """Return whether an address (etcd://HOST:PORT or etcds://HOST:PORT) uses TLS, and its host and port.

    Raises:
        ValueError: the address is invalid, or has a user; the message does not repeat a password.
    """
    scheme, _, place = address.partition("://")
    if "@" in place:
        raise ValueError(f"has a user, but {NO_USERS}")
    host, port = split_endpoint(place.rstrip("/"), 0)
    if not port:
        raise ValueError(f"must be {_KINDS}, with a port, got {address!r}")
    return scheme == "etcds", host, port


def read_witness(address: str) -> str:
    """Return the witness's address in the form that all hosts of the job receive.

    Raises:
        ValueError: the address is invalid.
    """
    scheme, colon, place = address.rpartition("://")
    if scheme not in _SCHEMES or (colon and not scheme):
        raise ValueError(f"must be {_KINDS}, got {re.sub('//.*@', '//…@', address)!r}")
    if scheme:
        _, host, port = split_etcd(address)
        return f"{scheme}://{join_endpoint(host, port)}"
    host, port = split_endpoint(place, 0)
    if not port:
        raise ValueError(f"must be {_KINDS}, with a port, got {address!r}")
    return join_endpoint(host, port)
