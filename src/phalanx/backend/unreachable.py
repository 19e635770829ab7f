"""When the job's store cannot be reached at the start: who waited where, what a look at that address says, what to do.

torch's own errors are kept, in class and in words; what they leave out is put before them.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError

_LOOK_S = 2.0


@dataclass(frozen=True)
class Meeting:
    """Where a rank goes to meet the others; -1 where its number, or theirs, is not known."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout: timedelta


@contextlib.contextmanager
def explained(meeting: Meeting) -> Iterator[None]:
    """Let torch's errors about the store say what is known of the meeting.

    Raises:
        DistNetworkError, DistStoreError: as torch does, with more words.
    """
    try:
        yield
    except (DistNetworkError, DistStoreError) as error:
        seen = "" if meeting.rank == 0 else look(meeting.host, meeting.port)
        raise type(error)(explain(meeting, seen, str(error))) from error


def look(host: str, port: int) -> str:
    """What one plain connection to that address meets; empty when it is made."""
    try:
        with socket.create_connection((host, port), timeout=_LOOK_S):
            return ""
    except ConnectionRefusedError:
        return "the host refuses connections to that port: nobody listens there"
    except socket.gaierror as error:
        return f"this host knows no such name ({error.strerror})"
    except TimeoutError:
        return "nothing answers at that address"
    except OSError as error:
        return f"it cannot be reached ({error.strerror or error})"


def explain(meeting: Meeting, seen: str, said: str) -> str:
    """The message. `seen` is what `look` says, `said` what torch says."""
    who = f" on rank {meeting.rank} of {meeting.world_size}" if meeting.rank >= 0 else ""
    place = f"{meeting.host} port {meeting.port}"
    span = f"within {meeting.timeout.total_seconds():.1f} s"
    said = said.splitlines()[0] if said else "nothing"
    if meeting.rank == 0:
        others = meeting.world_size - 1
        missing = "rank 1" if others == 1 else f"some of ranks 1 to {others}" if others > 1 else "a store"
        return (
            f"init_process_group{who}: {missing} never came to {place} {span}.\n"
            f"torch said: {said}\n"
            "Check that every rank was started with this address and port (MASTER_ADDR, MASTER_PORT), that the other "
            "hosts reach it under this name, and that no other program has the port; the log of a missing rank comes "
            "first."
        )
    fact = seen or "something answers there, but no store of this job's: another program's port, or a job that ended"
    return (
        f"init_process_group{who}: rank 0 did not answer at {place} {span}: {fact}.\n"
        f"torch said: {said}\n"
        "Check that rank 0 was started and still runs (its log comes first), that MASTER_ADDR names its host as seen "
        "from here, that MASTER_PORT is the same on every rank, and that no firewall closes it."
    )
