"""Write the page of a running job from its ranks' records so far."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx._comm.diagnostics.step_file import read_folder
from phalanx._job.report.findings import find
from phalanx._job.report.gather import combine, find_job, of_ranks
from phalanx._job.report.job_record import RANKS
from phalanx._job.report.measurements import Measurements
from phalanx._job.report.page import render


def measure_so_far(folder: str) -> Measurements:
    """Return the current measurements of the run that is recorded for the report in `folder`."""
    files = read_folder(os.path.join(folder, RANKS))
    job = find_job(folder, files)
    return combine(job, of_ranks(job, files))


def write_page_so_far(folder: str, path: str | os.PathLike[str]) -> Measurements:
    """Write the page to the file `path`, and return its measurements.

    Raises:
        OSError: the file cannot be written.
    """
    run = measure_so_far(folder)
    Path(path).write_bytes(render(run, find(run)).encode(errors="backslashreplace"))
    return run
