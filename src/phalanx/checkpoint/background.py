"""`Saving` is one save on its way to the disk, on a thread or at once.

thread of each rank    write its part | say so
thread of rank 0       write its part | wait for all parts | commit
training               goes on, and hears of a failure at its next call
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from phalanx.deadline import Deadline
from phalanx.errors import CheckpointError

_LOOK_S = 0.002  # the first pause between two checks; later ones grow
_LOOK_AT_MOST_S = 0.1


class AbandonedError(CheckpointError):
    """The save was given up before all parts were there: a rank could not write its own, or is gone."""


@dataclass(frozen=True)
class Work:
    """`Work` is the work of a save; none of it talks to other ranks.

    write      this rank's part
    commit     on rank 0: give the checkpoint its name; called once `parts` are all there
    parts      on rank 0: the names by which other ranks tell that their parts are there
    missing    on rank 0: those of them that have not been told yet; it is looked at so often, at most
    discard    on rank 0: remove what was written
    """

    step: int
    write: Callable[[], None]
    commit: Callable[[], Path | str] | None = None
    parts: tuple[str, ...] = ()
    missing: Callable[[Collection[str]], list[str]] = list
    look_at_most_s: float = _LOOK_AT_MOST_S
    discard: Callable[[], None] = lambda: None


class Saving:
    """`Saving` is a save from its first byte to its name.

    `timeout_s` is how long rank 0 waits for the others after its own part.
    """

    def __init__(self, work: Work, timeout_s: float) -> None:
        self.step = work.step
        self.problem: Exception | None = None  # what went wrong in this rank's part
        self.failure: Exception | None = None  # what went wrong in the commit
        self.path: Path | str | None = None
        self._work = work
        self._timeout_s = timeout_s
        self._written = threading.Event()
        self._finished = threading.Event()
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._parent = os.getpid()

    @property
    def is_background(self) -> bool:
        """Return whether a thread does the work."""
        return self._thread is not None

    def start(self) -> None:
        """Start the work on a thread."""
        self._thread = threading.Thread(target=self._run, name=f"phalanx-checkpoint-{self.step}", daemon=True)
        self._thread.start()

    def write_now(self) -> None:
        """Write this rank's part on this thread; `commit_now` does the rest, when all ranks have come so far."""
        try:
            self._write()
        except BaseException:
            self._work.discard()
            raise

    def commit_now(self) -> None:
        """Give the checkpoint its name, on this thread."""
        try:
            self._commit()
        except BaseException:
            self._work.discard()
            raise

    def wait_written(self) -> Exception | None:
        """Wait until this rank's part is on the disk, or has failed; return the failure."""
        self._written.wait()
        return self.problem

    def wait_finished(self) -> Exception | None:
        """Wait until rank 0 has given the checkpoint its name, or has failed; return the failure."""
        self._finished.wait()
        self.join()
        return self.failure

    def is_finished(self) -> bool:
        """Return whether this rank has nothing left to do for the save."""
        return self._finished.is_set()

    def give_up(self) -> None:
        """End the save as soon as this rank's part is written: the checkpoint gets no name, unless it has one by then.

        What was written is removed, also where the thread here has removed it while another rank was still writing.
        """
        self._given_up.set()
        if self._thread is None:
            self._finished.set()
        self._finished.wait()
        self.join()
        if self.path is None:
            self._work.discard()

    def finish_alone(self, timeout_s: float) -> None:
        """Wait for the end without asking other ranks: for the own part, and up to `timeout_s` for theirs."""
        self._written.wait()
        if not self._finished.wait(timeout_s):
            self.give_up()
        self.join()

    def join(self) -> None:
        """Wait for the thread to end."""
        if self._thread is not None and os.getpid() == self._parent:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
            if self.problem is None:
                self._commit()
            else:
                self._work.discard()
        finally:
            self._finished.set()

    def _write(self) -> None:
        try:
            self._work.write()
        except Exception as error:
            self.problem = error
        finally:
            self._written.set()

    def _commit(self) -> None:
        try:
            if self._work.commit is not None:
                self._await_parts()
                self.path = self._work.commit()
        except Exception as error:
            self.failure = error
            self._work.discard()
        finally:
            self._finished.set()

    def _await_parts(self) -> None:
        deadline, pause = Deadline.after(self._timeout_s), _LOOK_S
        missing = list(self._work.parts)
        while missing and (missing := self._work.missing(missing)):
            if self._given_up.is_set():
                raise AbandonedError("given up before all ranks had written their parts")
            if deadline.passed:
                raise AbandonedError(f"{', '.join(missing)} did not come within {deadline.timeout_s} s")
            self._given_up.wait(pause)
            pause = min(2 * pause, self._work.look_at_most_s)
