"""`Witness` is an additional vote: the voter's state is in a register outside the job, named by `--witness`.

    client ── reads the voter's promises and acceptances ── executes the voter's step ── writes the result, if no other
                    client has written ──► has the voter's reply

Two hosts and a witness are three voters, so one host and the witness are a majority. The voter is the same as on each
host (`hosts.succession.voter`): the register serializes its steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from phalanx._comm.control.key import Key
from phalanx._comm.control.wire import MALFORMED
from phalanx._job.hosts.succession.config import Config, Term
from phalanx._job.hosts.succession.message import config_from_json, config_to_json, term_from_json
from phalanx._job.hosts.succession.voter import Reply, Voter
from phalanx._job.hosts.succession.witness.register import Register, open_register
from phalanx.errors import CoordinationError

WITNESS = -2  # its number among the voters, which no member has
_MOST_TRIES = 100  # a step between two steps of others is tried so often


class Witness:
    """A `Witness` serves one job. Its methods wait for the register, two seconds for each answer.

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
        """Read what `to_json` wrote.

        Raises:
            KeyError, TypeError: it is none.
        """
        return cls(str(fields["address"]), key, str(fields["job"]))

    def begin(self) -> None:
        """Register the job with the witness. After a failed call it may be called again.

        Raises:
            PhalanxError, OSError: the witness can't be reached.
        """
        register = self._open()
        if self._may_have_begun and not register.is_durable:
            return  # it may have promised something, and forgotten it since: a second value would promise it again
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
        """Return its reply to a host that wants to lead the job.

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
            if not state:  # it would repeat a promise that it has made to another host
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
            self._register = open_register(self.address, self._key)
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
