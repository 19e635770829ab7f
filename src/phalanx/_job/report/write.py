"""Write the contents of a report's folder from the records of the ranks and the launcher.

report.html    the page                    trace.json   for ui.perfetto.dev
report.json    the numbers behind it
job.json       the launcher's record       ranks/       the ranks' records: removed when the rest is written

Of a running job, only the page is written, to a file that the caller names.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from phalanx._comm.diagnostics.step_file import read_folder
from phalanx._job.report.findings import find
from phalanx._job.report.gather import combine, find_job, is_of_run, of_ranks
from phalanx._job.report.job_record import RANKS
from phalanx._job.report.measurements import Measurements
from phalanx._job.report.page import render
from phalanx._job.report.records import remove_records
from phalanx._job.report.trace import plan_trace

PAGE, DATA, TRACE = "report.html", "report.json", "trace.json"


def write_report(folder: str, *, keep_records: bool = False) -> Measurements:
    """Write the page, the numbers and the trace into `folder`; then remove the ranks' records, unless `keep_records`.

    Raises:
        OSError: the folder cannot be written.
    """
    files = read_folder(os.path.join(folder, RANKS))
    job = find_job(folder, files)
    files = of_ranks(job, files)
    run = combine(job, files)
    _write(folder, DATA, run.to_json().encode(errors="backslashreplace"))
    _write(folder, PAGE, render(run, find(run)).encode(errors="backslashreplace"))
    _write(folder, TRACE, json.dumps(plan_trace(job, files), separators=(",", ":")).encode())
    if not keep_records:
        remove_records(folder, lambda file: is_of_run(job, file))
        with suppress(OSError):  # the folder is not empty, or was never made
            os.rmdir(os.path.join(folder, RANKS))
    return run


def measure_so_far(folder: str) -> Measurements:
    """Return the current measurements of the run that is recorded for the report in `folder`."""
    files = read_folder(os.path.join(folder, RANKS))
    job = find_job(folder, files)
    return combine(job, of_ranks(job, files))


def write_page_so_far(folder: str, path: str | os.PathLike[str]) -> Measurements:
    """Write the page of the run in `folder` to the file `path`, and return the measurements.

    Raises:
        OSError: the file cannot be written.
    """
    run = measure_so_far(folder)
    Path(path).write_bytes(render(run, find(run)).encode(errors="backslashreplace"))
    return run


def _write(folder: str, name: str, data: bytes) -> None:
    """Write the file atomically."""
    path = os.path.join(folder, name)
    with open(f"{path}.part", "wb") as file:
        file.write(data)
    os.replace(f"{path}.part", path)
