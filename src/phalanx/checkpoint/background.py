"""Run one save of a checkpoint on a thread of each rank, while training continues.

thread of each rank    write its part | report
thread of rank 0       write its part | wait for all parts | commit
training               continues; a failure is logged at once, and handled by the next call
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx.checkpoint.peers import Peers
from phalanx.errors import CheckpointError

_POLL_S = 0.002  # the first pause between two checks; later ones grow
_MAX_POLL_S = 0.1
_SYNC_EVERY_S = 1.0  # how often ranks that wait for a save poll each other
_WARN_S = 60.0  # log a wait after this time, and again after ten times that


class AbandonedError(CheckpointError):
    """The save was aborted before all parts were written: a rank could not write its part, or was lost."""


@dataclass(frozen=True)
class SaveWork:
    """`SaveWork` is one rank's work for a save; it runs no collectives.

    write         write this rank's part
    commit        on rank 0: give the checkpoint its name, once all `parts` are written
    parts         on rank 0: the names by which other ranks report that their parts are written
    missing       on rank 0: return the names in `parts` that are not reported yet
    max_poll_s    on rank 0: the longest pause between two calls of `missing`
    discard       remove the files: on rank 0 those of the draft, on other ranks those not yet sent to an address
    """

    step: int
    write: Callable[[], None]
    commit: Callable[[], Path | str] | None = None
    parts: tuple[str, ...] = ()
    missing: Callable[[Collection[str]], list[str]] = list
    max_poll_s: float = _MAX_POLL_S
    discard: Callable[[], None] = lambda: None


class Saving:
    """`Saving` runs one save on a thread.

    `timeout_s` is how long rank 0 waits for the other ranks after its own part.
    """

    def __init__(self, work: SaveWork, timeout_s: float) -> None:
        self.step = work.step
        self.error: Exception | None = None  # the error of this rank's part, or of the commit
        self.path: Path | str | None = None
        self._work = work
        self._timeout_s = timeout_s
        self._written = threading.Event()
        self._finished = threading.Event()
        self._aborted = threading.Event()
        self._thread: threading.Thread | None = None
        self._parent = os.getpid()

    def start(self, report: Callable[[Exception], None] | None = None) -> None:
        """Start the work on a thread, which calls `report` if it fails."""
        name = f"phalanx-checkpoint-{self.step}"
        self._thread = threading.Thread(target=self._run, args=(report,), name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`, and return whether this rank's work for the save is over (it may have failed)."""
        if not self._finished.wait(timeout_s):
            return False
        self._join()
        return True

    def abort(self) -> None:
        """Abort the save, and wait until this rank's part is written: the checkpoint gets no name, unless it has one.

        Remove the files, again if necessary: another rank may have written some after the thread had removed them.
        """
        self._aborted.set()
        self._finished.wait()
        self._join()
        if self.path is None:
            self._work.discard()

    def finish_alone(self, timeout_s: float) -> None:
        """Wait for this rank's part, and up to `timeout_s` for the other ranks' parts, then abort. Not collective."""
        self._written.wait()
        if not self.wait(timeout_s):
            self.abort()

    def _join(self) -> None:
        if self._thread is not None and os.getpid() == self._parent:
            self._thread.join()

    def _run(self, report: Callable[[Exception], None] | None) -> None:
        try:
            try:
                self._work.write()
            finally:
                self._written.set()
            if self._work.commit is not None:
                self._await_parts()
                self.path = self._work.commit()
        except Exception as error:
            self.error = error
            self._work.discard()
            if report is not None and not self._aborted.is_set():
                report(error)
        finally:
            self._finished.set()

    def _await_parts(self) -> None:
        deadline, pause = Deadline.after(self._timeout_s), _POLL_S
        missing = list(self._work.parts)
        while missing and (missing := self._work.missing(missing)):
            if self._aborted.is_set():
                raise AbandonedError("aborted before all ranks had written their parts")
            if deadline.passed:
                raise AbandonedError(f"{', '.join(missing)} was not written within {deadline.timeout_s} s")
            self._aborted.wait(pause)
            pause = min(2 * pause, self._work.max_poll_s)


def wait_together(
    peers: Peers, saving: Saving, explain: Callable[[Exception], CheckpointError]
) -> CheckpointError | None:
    """Wait on all ranks until a save is over, and return the error of any rank, or None. All ranks call this.

    Ranks that have finished repeat short collectives. So the group's timeout does not expire, no matter how long a rank
    writes, and no rank counts as silent.
    """
    started, warned_s = time.monotonic(), 0.0
    while True:
        is_finished = saving.wait(_SYNC_EVERY_S)
        gathered = peers.all_gather((is_finished, explain(saving.error) if is_finished and saving.error else None))
        failure = next((failure for _, failure in gathered if failure is not None), None)
        writing = [rank for rank, (is_finished, _) in enumerate(gathered) if not is_finished]
        if failure is not None or not writing:
            return failure
        waited_s = time.monotonic() - started
        if peers.is_first and waited_s >= max(_WARN_S, 10 * warned_s):
            warned_s = waited_s
            get_logger(__name__).warning(
                "%s: training waits for the checkpoint of step %d, which %s still writes, for %.0f s so far. The disk "
                "is slow: save less often, or to another disk.",
                peers.what,
                saving.step,
                name_ranks(writing),
                waited_s,
            )
