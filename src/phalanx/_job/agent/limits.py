"""Check and raise the agent's limit on open files, and explain which limit to raise if a rank cannot be started."""

from __future__ import annotations

import errno
import resource

from phalanx._base.control_groups import find_groups, read_number
from phalanx._base.descriptors import raise_limit

_FDS_PER_RANK = 5  # the read ends of two pipes, the files for its dump and its stacks, and its log
_FDS_IN_TRANSIT = 40  # five for each fork that may be requested ahead
_FDS_OF_JOB = 24  # libraries, signals, the zygote, the store, reports, the agent's socket
# flight recorders of groups and connections of `phalanx top`; without room for them the job still runs
_FDS_OF_CLIENTS = 256


def needed_open_files(num_ranks: int) -> int:
    """Return the minimum number of descriptors that the agent needs for `num_ranks` ranks."""
    return (_FDS_PER_RANK - 1) * num_ranks + min(_FDS_IN_TRANSIT, 5 * num_ranks) + _FDS_OF_JOB


def find_problem(num_ranks: int) -> str | None:
    """Return why the agent cannot open enough descriptors for `num_ranks` ranks, for the user; None if it can."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = needed_open_files(num_ranks)
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return None
    return (
        f"{num_ranks} rank{'s' * (num_ranks > 1)} need {needed} open files in this command (RLIMIT_NOFILE), and at "
        f"most {hard} are allowed. Raise the limit (`ulimit -Hn`, LimitNOFILE= of a service, --ulimit nofile= of "
        "a container) or start fewer ranks."
    )


def raise_open_files(num_ranks: int) -> None:
    """Raise this process's soft limit on open files for `num_ranks` ranks; running processes keep their limits."""
    raise_limit((_FDS_PER_RANK + 1) * num_ranks + _FDS_IN_TRANSIT + _FDS_OF_JOB + _FDS_OF_CLIENTS)


def explain_start(rank: int, num_ranks: int, error: OSError) -> str:
    """Return the message for the user that `rank` could not be started."""
    return f"phalanx run: rank {rank} of {num_ranks} could not be started: {explain(error)}"


def explain(error: OSError) -> str:
    """Return which resource the system refused, and which limits to check."""
    why = f"{error.strerror or error}."
    if error.errno == errno.EAGAIN:
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        return (
            f"{why} There are too many processes: this user may have {limit} (`ulimit -u`), and a container or a "
            f"service may allow fewer{_read_pids_limit()}."
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{why} This command may have {soft} open files (`ulimit -n`; at most {hard}, `ulimit -Hn`)."
    if error.errno == errno.ENOMEM:
        return f"{why} Start fewer ranks, or check `ulimit -v` and the memory limit of the container."
    return why


def _read_pids_limit() -> str:
    """Return the limit of this process's cgroups, such as ` (pids.max is 100)`; empty if they have none."""
    limits = [limit for group in find_groups() if (limit := read_number(group, "pids.max")) is not None]
    return f" (pids.max is {min(limits)})" if limits else ""
