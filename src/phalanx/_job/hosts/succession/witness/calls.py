"""`WitnessCalls` sends a leader's proposals to the job's witness and receives its replies, without blocking."""

from __future__ import annotations

import threading

from phalanx._base.ipc.wakeup import Mailbox
from phalanx._job.hosts.succession.config import Config, Term
from phalanx._job.hosts.succession.voter import Reply
from phalanx._job.hosts.succession.witness.witness import Witness
from phalanx.errors import PhalanxError

_END_S = 2.0  # how long `close` waits for a pending answer


class WitnessCalls:
    """`WitnessCalls` requests votes in a thread, so that the leader does not wait for the witness.

    `fileno` is readable when `receive` has something.

    Arguments:
        is_new: whether the job is not registered with the witness yet.
    """

    def __init__(self, witness: Witness, *, is_new: bool) -> None:
        self.witness = witness
        self._is_new = is_new
        self._next: Config | Term | None = None  # the next request
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_silent = False  # whether the witness does not answer, which was reported to the user
        self._replies: Mailbox[Reply | str] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="phalanx-witness", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something."""
        return self._replies.fileno()

    def ask(self, asked: Config | Term) -> None:
        """Request a vote on a config, or a promise of a term; replace a request that has not been sent yet."""
        with self._changed:
            self._next = asked
            self._changed.notify()

    def receive(self) -> list[Reply | str]:
        """Return the replies since the last call; each string is a line for the user."""
        return self._replies.receive_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._next is None and not self._is_closed:
                    self._changed.wait()
                asked, self._next = self._next, None
            if asked is None or self._is_closed:
                break
            try:
                if self._is_new:
                    self.witness.begin()
                    self._is_new = False
                if isinstance(asked, Config):
                    reply = self.witness.propose(asked)
                else:
                    reply = self.witness.solicit(asked)
            except (PhalanxError, OSError) as error:
                self.witness.close()
                if not self._is_silent:
                    why = (
                        str(error).splitlines()[0].rstrip(".")
                    )  # the other lines are advice on a job's own coordinator
                    self._replies.put(
                        f"the witness at {self.witness.address} does not vote: {why}. Until it does, the loss of a "
                        "host may end the job"
                    )
                self._is_silent = True
            else:
                if self._is_silent:
                    self._replies.put(f"the witness at {self.witness.address} votes")
                self._is_silent = False
                self._replies.put(reply)
        self.witness.close()

    def close(self) -> None:
        """Close the descriptor; wait at most two seconds for the thread, which may wait for an answer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_END_S)
        self._replies.close()
