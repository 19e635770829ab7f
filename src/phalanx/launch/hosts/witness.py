"""`Witness` is a vote that no host has: the voter's state lies in a register outside the job, as `--witness` names it.

    whoever asks ── reads what the voter has promised and accepted ── takes the voter's step ── writes that, if nobody
                    else has written ──► has the voter's reply

Two hosts and a witness are three voters, so that one host and the witness are a majority. The voter is the one that
each host has (`coordination.succession.voter`): the register makes its steps one after another.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from phalanx.coordination.client import Client
from phalanx.coordination.key import Key
from phalanx.coordination.succession.config import Config, Term
from phalanx.coordination.succession.voter import Reply, Voter
from phalanx.errors import CoordinationError, PhalanxError
from phalanx.ipc.wakeup import Mailbox
from phalanx.launch.hosts.control_channel import MALFORMED
from phalanx.launch.hosts.etcd_register import EtcdRegister, is_etcd
from phalanx.launch.hosts.succession_message import config_from_json, config_to_json, term_from_json

WITNESS = -2  # its number among the voters, which no member has
_ANSWER_S = 2.0
_MOST_TRIES = 100  # of a step between two steps of others


class Register(Protocol):
    """Values by name outside the job. Each method raises PhalanxError or OSError where it can't be reached."""

    def read(self, name: str) -> bytes:
        """Return a value; nothing where there is none."""

    def write(self, name: str, expected: bytes, value: bytes) -> bool:
        """Write a value in place of the expected one (nothing: there is none yet); return whether it was that one."""

    def delete(self, name: str) -> None:
        """Delete a value, if there is one."""

    def close(self) -> None:
        """Let go of the connection."""


class CoordinatorRegister:
    """The store of a `phalanx coordinator` on a host that is none of the job's."""

    def __init__(self, endpoint: str, key: Key | None) -> None:
        self._client = Client(endpoint, key, timeout=_ANSWER_S)

    def read(self, name: str) -> bytes:
        """Return a value; nothing where there is none."""
        return self._client.get(name, _ANSWER_S) if self._client.check([name]) else b""

    def write(self, name: str, expected: bytes, value: bytes) -> bool:
        """Write a value in place of the expected one; return whether it was that one."""
        return self._client.compare_set(name, expected, value) == value

    def delete(self, name: str) -> None:
        """Delete a value, if there is one."""
        self._client.delete_key(name)

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()


class Witness:
    """`Witness` is that of one job. Its methods wait for the register, two seconds for each answer.

    Arguments:
        address: HOST:PORT of a `phalanx coordinator` that has the job's key, or etcd://HOST:PORT.
        job: what tells this job from others that have the same witness.
    """

    def __init__(self, address: str, key: Key | None, job: str) -> None:
        self.address = address
        self.job = job
        self._key = key
        self._name = f"phalanx/witness/{job}"
        self._register: Register | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what another host needs besides the job's key."""
        return {"address": self.address, "job": self.job}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], key: Key | None) -> Witness:
        """Read what `to_json` wrote.

        Raises:
            KeyError, TypeError: it is none.
        """
        return cls(str(fields["address"]), key, str(fields["job"]))

    def begin(self) -> None:
        """Have it know of the job, of which it has heard nothing yet. A second call does nothing.

        Raises:
            PhalanxError, OSError: it can't be reached.
        """
        self._open().write(self._name, b"", _to_bytes(Voter(WITNESS)))

    def propose(self, config: Config) -> Reply:
        """Return its reply to a proposal.

        Raises:
            PhalanxError, OSError: it can't be reached, or does not know of the job.
        """
        return self._take_step(lambda voter: voter.propose(config))

    def solicit(self, term: Term) -> Reply:
        """Return its reply to a host that wants to lead the job.

        Raises:
            PhalanxError, OSError: as `propose`.
        """
        return self._take_step(lambda voter: voter.solicit(term))

    def forget(self) -> None:
        """Delete what it knows of the job, which is over.

        Raises:
            PhalanxError, OSError: it can't be reached.
        """
        self._open().delete(self._name)

    def _take_step(self, step: Callable[[Voter], tuple[Voter, Reply]]) -> Reply:
        register = self._open()
        for _ in range(_MOST_TRIES):
            state = register.read(self._name)
            if not state:  # it would promise again what it has promised another one
                raise CoordinationError("it knows nothing of this job (it was started again, or was cleared)")
            try:
                before = _from_bytes(state)
            except MALFORMED:
                raise CoordinationError(f"its value {self._name} is none that Phalanx has written") from None
            after, reply = step(before)
            if after == before or register.write(self._name, state, _to_bytes(after)):
                return reply
        raise CoordinationError("others write there all the time")

    def _open(self) -> Register:
        if self._register is None:
            is_in_etcd = is_etcd(self.address)
            self._register = EtcdRegister(self.address) if is_in_etcd else CoordinatorRegister(self.address, self._key)
        return self._register

    def close(self) -> None:
        """Let go of the connection; the next call opens another one."""
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


class WitnessCalls:
    """What the leader proposes to its witness, on a thread of its own, so that nobody waits for an answer.

    `fileno` is readable when `take` has something.

    Arguments:
        is_new: whether it has heard nothing of the job yet.
    """

    def __init__(self, witness: Witness, *, is_new: bool) -> None:
        self.witness = witness
        self._is_new = is_new
        self._next: Config | None = None  # what to propose next
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_told = False  # that it does not answer
        self._heard: Mailbox[Reply | str] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="phalanx-witness", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` has something."""
        return self._heard.fileno()

    def propose(self, config: Config) -> None:
        """Have this config proposed, in place of an earlier one that waits."""
        with self._changed:
            self._next = config
            self._changed.notify()

    def take(self) -> list[Reply | str]:
        """Return its replies since the last call, and as text what the user is to be told."""
        return self._heard.take()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._next is None and not self._is_closed:
                    self._changed.wait()
                config, self._next = self._next, None
            if config is None or self._is_closed:
                break
            try:
                if self._is_new:
                    self.witness.begin()
                    self._is_new = False
                reply = self.witness.propose(config)
            except (PhalanxError, OSError) as error:
                self.witness.close()
                if not self._is_told:
                    why = str(error).rstrip(".")
                    self._heard.put(
                        f"the witness at {self.witness.address} does not vote: {why}. Until it does, the job may end "
                        "with a host that is lost"
                    )
                self._is_told = True
            else:
                if self._is_told:
                    self._heard.put(f"the witness at {self.witness.address} votes")
                self._is_told = False
                self._heard.put(reply)
        self.witness.close()

    def close(self) -> None:
        """End the thread, which may wait for an answer for seconds: it is not waited for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_ANSWER_S)
        self._heard.close()
