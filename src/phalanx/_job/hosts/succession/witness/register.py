"""A `Register` stores a witness's vote: in the store of a coordinator outside the job, or in an etcd."""

from __future__ import annotations

from typing import Protocol

from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._job.hosts.succession.witness.address import is_etcd
from phalanx._job.hosts.succession.witness.etcd_register import EtcdRegister

_ANSWER_S = 2.0


class Register(Protocol):
    """`Register` has values by name outside the job. Each method raises PhalanxError or OSError if unreachable."""

    is_durable: bool
    """Whether it still has its values when it was started again."""

    def read(self, name: str) -> bytes:
        """Return a value; nothing where there is none."""

    def write(self, name: str, expected: bytes, value: bytes) -> bool:
        """Write a value in place of the expected one (nothing: there is none yet); return whether it was that one."""

    def delete(self, name: str) -> None:
        """Delete a value, if there is one."""

    def close(self) -> None:
        """Let go of the connection."""


class CoordinatorRegister:
    """`CoordinatorRegister` is the store of a `phalanx coordinator` on a host that is none of the job's."""

    is_durable = False

    def __init__(self, endpoint: str, key: Key | None) -> None:
        self._client = Client(endpoint, key, timeout=_ANSWER_S)

    def read(self, name: str) -> bytes:
        return self._client.get(name, _ANSWER_S) if self._client.check([name]) else b""

    def write(self, name: str, expected: bytes, value: bytes) -> bool:
        return self._client.compare_set(name, expected, value) == value

    def delete(self, name: str) -> None:
        self._client.delete_key(name)

    def close(self) -> None:
        self._client.close()


def open_register(address: str, key: Key | None) -> Register:
    """Return the register at HOST:PORT of a `phalanx coordinator` that has this key, or at etcd://HOST:PORT.

    Raises:
        CoordinationError: no coordinator answers there, or this host lacks a prerequisite for asking.
    """
    return EtcdRegister(address) if is_etcd(address) else CoordinatorRegister(address, key)
