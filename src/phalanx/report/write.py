"""Everything that a report's folder holds, from what ranks and launcher have left in it."""

from __future__ import annotations

import os
import shutil

from phalanx.report.findings import find
from phalanx.report.gather import gather
from phalanx.report.job_record import RANKS
from phalanx.report.measurements import Measurements
from phalanx.report.page import render

PAGE, DATA = "report.html", "report.json"


def write_report(folder: str, *, keep_records: bool = False) -> Measurements:
    """Write the page and its companions into `folder`; the ranks' records go, as report.json has what they say.

    Raises:
        OSError: it cannot be written.
    """
    run = gather(folder)
    write_file(folder, DATA, run.to_json())
    write_file(folder, PAGE, render(run, find(run)))
    if not keep_records:
        shutil.rmtree(os.path.join(folder, RANKS), ignore_errors=True)
    return run


def write_file(folder: str, name: str, text: str) -> None:
    """Whole or not at all."""
    path = os.path.join(folder, name)
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.part", path)
