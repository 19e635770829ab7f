"""Execute the call in a rank, and write its outcome."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx._job.launch.calls import outcome, payload
from phalanx._job.launch.calls.outcome import RankOutcome

# the files in a call's folder: the call, the caller's surroundings, the job's settings (a pickle), the job's result
PAYLOAD, SURROUNDINGS, SETTINGS, RESULT = "call", "surroundings", "settings", "result"


def run(folder: str) -> None:
    """Execute the call in `folder`, write its outcome, and raise its exception, which the agent reports."""
    rank = int(os.environ["RANK"])
    path = outcome_path(folder, rank)
    path.unlink(missing_ok=True)  # left by an earlier attempt
    try:
        payload.restore_surroundings(Path(folder, SURROUNDINGS).read_bytes())
        fn, args, kwargs = payload.decode(Path(folder, PAYLOAD).read_bytes())
        payload.show_in_main(fn)
        result = fn(*args, **kwargs)
    except BaseException as error:
        outcome.write(path, RankOutcome(rank, text=outcome.describe_error(error), error=error), payload.encode_value)
        raise
    outcome.write(path, RankOutcome(rank, result=result), payload.encode_value)


def outcome_path(folder: str, rank: int) -> Path:
    """Return the path of the outcome of `rank`."""
    return Path(folder, f"outcome-{rank}")
