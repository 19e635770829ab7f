"""Load the call in a rank, make it, and write down what came of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from phalanx._job.agent.folder import find_job_folder
from phalanx._job.hosts import remote_calls
from phalanx._job.launch.calls import outcome, payload
from phalanx._job.launch.calls.outcome import Outcome


def run(folder: str) -> None:
    """Make the call that lies in `folder` of the first host; raises what it raises, for the agent to hear."""
    rank, client = int(os.environ["RANK"]), remote_calls.connect(os.environ)
    if client is None:
        _run(rank, folder)
        return
    files = (payload_path(folder), surroundings_path(folder))
    if os.environ["GROUP_RANK"] == "0":
        if rank == 0:
            for file in files:
                remote_calls.put(client, file.name, file.read_bytes())
        client.close()
        _run(rank, folder)
        return
    # In the job's folder: after a failure elsewhere this process is told to end, and removes nothing itself.
    with tempfile.TemporaryDirectory(prefix="call-", dir=find_job_folder(), ignore_cleanup_errors=True) as own:
        timeout_s = remote_calls.find_join_timeout(client)  # rank 0 may still be importing
        for file in files:
            Path(own, file.name).write_bytes(remote_calls.take(client, file.name, timeout_s))
        told = outcome_path(own, rank)
        remote_calls.forget(client, told.name)
        try:
            _run(rank, own)
        finally:
            if told.exists():
                remote_calls.put(client, told.name, told.read_bytes())
            client.close()


def _run(rank: int, folder: str) -> None:
    path = outcome_path(folder, rank)
    path.unlink(missing_ok=True)  # it may be left of an attempt before this one
    try:
        payload.take_over(surroundings_path(folder).read_bytes())
        fn, args, kwargs = payload.decode(payload_path(folder).read_bytes())
        payload.show_in_main(fn)
        result = fn(*args, **kwargs)
    except BaseException as error:
        outcome.write(path, Outcome(rank, text=outcome.describe_error(error), error=error), payload.encode_value)
        raise
    outcome.write(path, Outcome(rank, result=result), payload.encode_value)


def payload_path(folder: str) -> Path:
    """Return where the call lies."""
    return Path(folder, "call")


def surroundings_path(folder: str) -> Path:
    """Return where that lies which the call expects to find around it."""
    return Path(folder, "surroundings")


def outcome_path(folder: str, rank: int) -> Path:
    """Return where the outcome of `rank` appears."""
    return Path(folder, f"outcome-{rank}")
