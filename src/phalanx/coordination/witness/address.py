"""Read where a witness's vote lies, as `--witness` has it: a coordinator, an etcd or a Lease of Kubernetes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.coordination.rendezvous import join_endpoint, split_endpoint

_KINDS = "HOST:PORT, etcd://HOST:PORT or lease://NAMESPACE/NAME"
_SCHEMES = ("", "etcd", "etcds")
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"  # as Kubernetes names a namespace


@dataclass(frozen=True)
class LeaseAddress:
    """A `LeaseAddress` is that of a Lease; without a namespace it lies in the one of the pod that asks."""

    namespace: str
    name: str


def is_etcd(address: str) -> bool:
    """Return whether an address is that of an etcd: etcd://HOST:PORT, or etcds:// with TLS."""
    return address.partition("://")[0] in ("etcd", "etcds")


def is_lease(address: str) -> bool:
    """Return whether an address is that of a Lease: lease://NAMESPACE/NAME, or lease://NAME."""
    return address.startswith("lease://")


def read_lease(address: str) -> LeaseAddress:
    """Return the Lease of lease://NAMESPACE/NAME or lease://NAME.

    Raises:
        ValueError: Kubernetes has no such names.
    """
    namespace, _, name = address.removeprefix("lease://").rpartition("/")
    has_names = re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", name) and (not namespace or re.fullmatch(_LABEL, namespace))
    if not has_names or len(name) > 253:
        raise ValueError(
            f"must be lease://NAMESPACE/NAME, or lease://NAME for the pod's own namespace, with names of lower-case "
            f"letters, digits and dashes, got {address!r}"
        )
    return LeaseAddress(namespace, name)


def split_etcd(address: str) -> tuple[bool, str, str, int]:
    """Return whether etcd://USER@HOST:PORT or etcds://USER@HOST:PORT has TLS, its user or "", its host and port.

    Raises:
        ValueError: it is none; a password that stands there is not repeated.
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
    """Return the address as all hosts of the job are told it.

    Raises:
        ValueError: it is none.
    """
    if is_lease(address):
        read_lease(address)
        return address
    scheme, colon, place = address.rpartition("://")
    if scheme not in _SCHEMES:
        raise ValueError(f"must be {_KINDS}, got {re.sub('//.*@', '//…@', address)!r}")
    if scheme:
        _, user, host, port = split_etcd(address)
        return f"{scheme}://{user}{'@' * bool(user)}{join_endpoint(host, port)}"
    host, port = split_endpoint(place, 0)
    if not port:
        raise ValueError(f"must be {_KINDS}, with a port, got {address!r}")
    return f"{scheme}{colon}{join_endpoint(host, port)}"
