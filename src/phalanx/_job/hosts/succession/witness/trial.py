"""`WitnessTrial` tries whether a host that stands by can ask the job's witness, before the job depends on it."""

from __future__ import annotations

import threading

from phalanx._base.ipc.wakeup import Mailbox
from phalanx._job.hosts.succession.witness.witness import Witness
from phalanx.errors import PhalanxError

_END_S = 2.0  # that an answer may take as the thread ends


class WitnessTrial:
    """`WitnessTrial` asks a witness once, on a thread of its own; it closes the witness.

    `fileno` is readable when `take` has something.
    """

    def __init__(self, witness: Witness) -> None:
        self._witness = witness
        self._heard: Mailbox[str] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="phalanx-witness", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` has something."""
        return self._heard.fileno()

    def take(self) -> list[str]:
        """Return what the user is to be told, if the witness did not answer."""
        return self._heard.take()

    def _run(self) -> None:
        try:
            self._witness.check()
        except (PhalanxError, OSError) as error:
            why = str(error).splitlines()[0].rstrip(".")  # the rest is advice for a job's own coordinator
            self._heard.put(
                f"the witness at {self._witness.address} does not answer this host: {why}. Unless it does when the "
                "host that leads is lost, this host may not lead in its place"
            )
        finally:
            self._witness.close()

    def close(self) -> None:
        """End the thread, which may wait for an answer for seconds: it is not waited for."""
        self._thread.join(_END_S)
        self._heard.close()
