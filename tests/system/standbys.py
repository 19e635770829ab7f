"""Who leads an elastic job on several hosts, and who would lead in its place, as the commands say it."""

from __future__ import annotations

import re
from typing import Literal

from tests.system.elastic_hosts import Cluster
from tests.system.elastic_job import Job

WAITS = {"WAIT_S": "600"}


ONE_WAY: dict[str, Literal["sent", "received"]] = {"heard by nobody": "sent", "deaf to all": "received"}


def await_standbys(made: Cluster, leader: int, count: int = 1) -> None:
    """Until so many hosts may take over."""
    made.wait_for(leader, "without this host, " if count == 1 else " or vm")


def find_leader(made: Cluster, *numbers: int, changes: int = 1) -> int:
    """Return which of these hosts leads the job after so many changes, as soon as it says so."""
    for number in numbers:
        lines = made.jobs[number].lines
        while len(told := [line for line in lines if "leads the job now" in line]) < changes:
            lines.append(made.jobs[number].running.read_until("").rstrip("\n"))
        if "this host leads the job now" in told[-1]:
            return number
    raise AssertionError("no host says that it leads the job")


def address_of(job: Job) -> str:
    """Return where hosts that come join the job that this host leads."""
    (address,) = [found[1] for line in job.lines if (found := re.search(r"phalanx join (\S+)$", line))]
    return address
