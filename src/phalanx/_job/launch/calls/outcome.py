"""A `RankOutcome` is the result of a call in one rank. The rank writes it atomically; the caller reads it."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RankOutcome:
    """A `RankOutcome` is the result or error of a rank. `text` is empty on success, else a headline and details."""

    rank: int
    result: Any = None
    text: str = ""
    error: BaseException | None = None
    running: bool = False

    @property
    def failed(self) -> bool:
        """Return whether the function did not return."""
        return bool(self.text)


def call(rank: int, fn: Callable[[], Any]) -> RankOutcome:
    """Call `fn`, and return its outcome, whatever it raises."""
    try:
        return RankOutcome(rank, result=fn())
    except BaseException as error:
        return RankOutcome(rank, text=describe_error(error), error=error)


def describe_error(error: BaseException) -> str:
    """Return a headline, and the traceback."""
    return f"raised {type(error).__name__}\n" + "".join(traceback.format_exception(error))


def write(path: Path, outcome: RankOutcome, dumps: Callable[[Any], bytes] = pickle.dumps) -> None:
    """Write `outcome` to `path` atomically. If `dumps` cannot pickle it, write why."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(_pickled(outcome, dumps))
    draft.rename(path)


def read(path: Path, rank: int) -> RankOutcome | None:
    """Return the outcome in `path`, a failure if it cannot be unpickled here; None if the rank has written none."""
    if not path.exists():
        return None
    try:
        outcome: RankOutcome = pickle.loads(path.read_bytes())
    except Exception as problem:  # of a module that only the rank could import, or of the object's own code
        text = "returned or raised an object that cannot be unpickled in the process that called it"
        return RankOutcome(rank, text=f"{text}\n{describe_error(problem)}")
    return outcome


def _pickled(outcome: RankOutcome, dumps: Callable[[Any], bytes]) -> bytes:
    # Never the pickle of multiprocessing: it sends tensors as handles of this process, which is about to exit.
    try:
        data = dumps(outcome)
        if outcome.error is not None:
            pickle.loads(data)  # exceptions with their own constructor can often be pickled, but not unpickled
        return data
    except Exception as problem:
        if outcome.error is not None:
            return pickle.dumps(replace(outcome, error=None))
        kind = type(outcome.result).__name__
        text = f"returned a {kind}, which cannot be pickled\n{describe_error(problem)}"
        return pickle.dumps(RankOutcome(outcome.rank, text=text))


def describe_exit(exit_code: int) -> str:
    """Describe an exit code of `multiprocessing`; negative codes are signals."""
    if exit_code >= 0:
        return f"exited with code {exit_code} before its function returned"
    try:
        return f"died by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"died by signal {-exit_code}"
