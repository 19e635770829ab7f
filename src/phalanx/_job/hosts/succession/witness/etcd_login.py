"""Find the user, the password and the certificates for an etcd in the variables that etcdctl has, on each host."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx._job.hosts.succession.witness.json_service import make_tls
from phalanx.errors import CoordinationError

_PASSWORD_FILE = "PHALANX_WITNESS_PASSWORD_FILE"


@dataclass(frozen=True)
class EtcdLogin:
    """An `EtcdLogin` is a user of an etcd; it does not show the password."""

    user: str
    password: str = field(repr=False)


def find_login(user: str, variables: Mapping[str, str]) -> EtcdLogin | None:
    """Return the login of a user, or of ETCDCTL_USER where the address names none; None where neither does.

    The password is that of PHALANX_WITNESS_PASSWORD_FILE's file, of ETCDCTL_PASSWORD, or behind ETCDCTL_USER's colon.

    Raises:
        CoordinationError: there is a user, and no password.
    """
    told = variables.get("ETCDCTL_USER", "")
    password = _read_password(variables)
    if not password and ":" in told and told.partition(":")[0] == (user or told.partition(":")[0]):
        user, _, password = told.partition(":")
    user = user or told
    if not user:
        return None
    if not password:
        raise CoordinationError(
            f"the user {user} of etcd has no password on this host: set ETCDCTL_PASSWORD, or {_PASSWORD_FILE} to a "
            "file that has it"
        )
    return EtcdLogin(user, password)


def _read_password(variables: Mapping[str, str]) -> str:
    path = variables.get(_PASSWORD_FILE, "")
    if not path:
        return variables.get("ETCDCTL_PASSWORD", "")
    try:
        return Path(path).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CoordinationError(f"{_PASSWORD_FILE}: the password cannot be read: {error}") from None


def find_tls(variables: Mapping[str, str]) -> ssl.SSLContext:
    """Return the context of ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY; without them, the system's CAs count.

    Raises:
        CoordinationError: one of the files cannot be read.
    """
    names = [variables.get(f"ETCDCTL_{name}", "") for name in ("CACERT", "CERT", "KEY")]
    try:
        return make_tls(*names)
    except OSError as error:  # ssl.SSLError is one
        raise CoordinationError(
            f"the certificates for etcd cannot be read (ETCDCTL_CACERT={names[0]} ETCDCTL_CERT={names[1]} "
            f"ETCDCTL_KEY={names[2]}): {error}"
        ) from None
