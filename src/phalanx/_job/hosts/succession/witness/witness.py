"""`Witness` is one more voter, whose state is in a register outside the job, named by `--witness`.

    client ── reads the voter's state ── computes the voter's next state and reply ── writes the state, unless another
                    client has written ──► the reply is valid

Two hosts and a witness are three voters, so one host and the witness are a majority. The voter is the same `Voter` as
on each host; the register serializes its steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._comm.control.wire import MALFORMED
from phalanx._job.hosts.succession.config import Config, Term
from phalanx._job.hosts.succession.message import config_from_json, config_to_json, term_from_json
from phalanx._job.hosts.succession.voter import Reply, Voter
from phalanx._job.hosts.succession.witness.address import is_etcd
from phalanx._job.hosts.succession.witness.etcd_register import EtcdRegister
from phalanx.errors import CoordinationError

WITNESS = -2  # the witness's number among the voters; no member has this number
_ANSWER_S = 2.0
_MOST_TRIES = 100  # how often a step is tried while other clients write


class Register(Protocol):
    """A `Register` stores named values outside the job. Each method raises PhalanxError or OSError if unreachable."""

    is_durable: bool
    """Whether the values survive a restart."""

    def read(self, name: str) -> bytes:
        """Return a value; b"" if there is none."""

    def write(self, name: str, expected: bytes, value: bytes) -> bool:
        """Replace the expected value (b"": there is none yet); return False if the value is not the expected one."""

    def delete(self, name: str) -> None:
        """Delete a value, if there is one."""

    def close(self) -> None:
        """Close the connection."""


class CoordinatorRegister:
    """A `CoordinatorRegister` is the store of a `phalanx coordinator` on a host outside the job."""

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
        CoordinationError: no coordinator answers there, or the certificates for etcd cannot be read.
    """
    return EtcdRegister(address) if is_etcd(address) else CoordinatorRegister(address, key)


class Witness:
    """A `Witness` serves one job. Its methods block until the register answers, for up to two seconds per request.

    Arguments:
        address: HOST:PORT of a `phalanx coordinator` that has the job's key, or etcd://HOST:PORT.
        job: the identity of this job among others with the same witness.
    """

    def __init__(self, address: str, key: Key | None, job: str) -> None:
        self.address = address
        self.job = job
        self._key = key
        self._name = f"phalanx/witness/{job}"
        self._register: Register | None = None
        self._may_have_begun = False

    def to_json(self) -> dict[str, Any]:
        """Return what another host needs for this witness, apart from the job's key."""
        return {"address": self.address, "job": self.job}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], key: Key | None) -> Witness:
        """Return the witness that the result of `to_json` describes.

        Raises:
            KeyError, TypeError: the data is invalid.
        """
        return cls(str(fields["address"]), key, str(fields["job"]))

    def begin(self) -> None:
        """Register the job with the witness; after a failure, the caller may try again.

        Raises:
            PhalanxError, OSError: the witness can't be reached.
        """
        register = self._open()
        if self._may_have_begun and not register.is_durable:
            return  # the register may have lost a promise since: a new voter could break it
        self._may_have_begun = True
        register.write(self._name, b"", _to_bytes(Voter(WITNESS)))

    def check(self) -> None:
        """Read the job's vote from the witness, to check that it answers.

        Raises:
            PhalanxError, OSError: the witness can't be reached, or refuses this host.
        """
        self._open().read(self._name)

    def propose(self, config: Config) -> Reply:
        """Return the witness's reply to a proposal.

        Raises:
            PhalanxError, OSError: the witness can't be reached, or the job is not registered.
        """
        return self._vote(lambda voter: voter.propose(config))

    def solicit(self, term: Term) -> Reply:
        """Return the witness's reply to a candidate.

        Raises:
            PhalanxError, OSError: as `propose`.
        """
        return self._vote(lambda voter: voter.solicit(term))

    def forget(self) -> None:
        """Delete the vote of the finished job.

        Raises:
            PhalanxError, OSError: the witness can't be reached.
        """
        self._open().delete(self._name)

    def _vote(self, step: Callable[[Voter], tuple[Voter, Reply]]) -> Reply:
        register = self._open()
        for _ in range(_MOST_TRIES):
            state = register.read(self._name)
            if not state:  # a new voter could break a promise of the former one
                raise CoordinationError("it does not know this job (it was restarted, or its data was deleted)")
            try:
                before = _from_bytes(state)
            except MALFORMED:
                raise CoordinationError(f"Phalanx has not written its value {self._name}") from None
            after, reply = step(before)
            if after == before or register.write(self._name, state, _to_bytes(after)):
                return reply
        raise CoordinationError("other hosts keep changing its value")

    def _open(self) -> Register:
        if self._register is None:
            self._register = open_register(self.address, self._key)
        return self._register

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        register, self._register = self._register, None
        if register is not None:
            register.close()


def _to_bytes(voter: Voter) -> bytes:
    newest = None if voter.newest is None else config_to_json(voter.newest)
    return json.dumps({"promised": list(voter.promised), "newest": newest}).encode()


def _from_bytes(state: bytes) -> Voter:
    fields = json.loads(state)
    newest = None if fields["newest"] is None else config_from_json(fields["newest"])
    return Voter(WITNESS, term_from_json(fields["promised"]), newest)
