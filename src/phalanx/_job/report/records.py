"""List the ranks' files in a report's folder, and remove those that are no longer needed. Other files stay."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from phalanx._base.processes import read_stat
from phalanx._comm.diagnostics.step_file import RankFile, read_rank_file
from phalanx._job.report.job_record import RANKS, JobRecord

_CLOCK_SET_S = 60.0  # the maximum by which a host's clock may have been adjusted since the record


def list_records(folder: str) -> Iterator[tuple[Path, RankFile]]:
    """Yield the path and the contents of each file that can be read, in order of name."""
    for path in sorted(Path(folder, RANKS).glob("*.steps")):
        with suppress(OSError):
            if (read := read_rank_file(path.read_bytes())) is not None:
                yield path, read


def run_of(file: RankFile) -> str:
    """Return the id of the file's run; empty if the rank had none."""
    return str(file.facts.get("run", ""))


def remove_records(folder: str, is_removable: Callable[[RankFile], bool]) -> None:
    """Remove the ranks' files that `is_removable` selects; keep the folder, where other ranks may create files."""
    for path, file in list_records(folder):
        if is_removable(file):
            with suppress(OSError):
                path.unlink()


def remove_old_records(folder: str, run: str = "") -> None:
    """Remove the records of finished runs in `folder`, but not those of `run`, which begins or continues."""
    job = JobRecord.read(folder)
    over = job.run if job is not None and not is_running(job) and job.host == socket.gethostname() else ""

    def is_removable(file: RankFile) -> bool:
        if run and run_of(file) == run:
            return False
        if over and run_of(file) == over:
            return True
        here = file.facts.get("host") == socket.gethostname()
        return here and not is_alive(int(file.facts.get("pid", 0)), file.begun + file.unix_offset)

    remove_records(folder, is_removable)


def find_other_run(folder: str) -> JobRecord | None:
    """Return the running job of another process of this host that will write its report there, or None."""
    job = JobRecord.read(folder)
    return job if job is not None and job.pid != os.getpid() and is_running(job) else None


def is_running(job: JobRecord) -> bool:
    """Return whether a job of this host has not ended, and the process that writes its report is alive."""
    return job.end == "running" and job.host == socket.gethostname() and is_alive(job.pid, job.begun_unix)


def is_alive(pid: int, since: float) -> bool:
    """Return whether the process that had `pid` at Unix time `since` is alive; a later process may have that pid."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process is another user's
        pass
    fields = read_stat(pid)
    if not fields:  # this is not Linux
        return True
    if fields[0] in "ZX":
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age < since + _CLOCK_SET_S
