"""The hosts' clocks tell wrong times of day, and one jumps: an elastic job loses hosts all the same, and goes on.

The clocks are those of `wrong_clock.c`. CLOCK_MONOTONIC is another one on each host, too, as of all `phalanx.testing`.
"""

from __future__ import annotations

import csv
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.system import elastic_trainer
from tests.system.hosts_apart import HostsApart
from tests.system.standbys import await_standbys, find_leader

from phalanx import CheckpointManager
from phalanx._job.report.measurements import Measurements
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

pytestmark = [
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
    pytest.mark.slow,
]

HOUR_S = 3600


class WrongClocks(HostsApart):
    """Hosts whose times of day are wrong by what the files FOLDER/clock-NUMBER say."""

    library = ""

    def command_on(self, number: int) -> tuple[str, ...]:
        clock = self._folder / f"clock-{number}"
        return (*super().command_on(number), "env", f"LD_PRELOAD={self.library}", f"WRONG_CLOCK={clock}")

    def set_clock(self, number: int, hours: int) -> None:
        path = self._folder / f"clock-{number}"
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.write((hours * HOUR_S).to_bytes(8, "little", signed=True))

    def wait_steps(self, number: int, count: int) -> None:
        """Until a host has shown so many more lines with a step."""
        job = self.jobs[number]
        while count:
            job.lines.append(job.running.read_until("").rstrip("\n"))
            count -= "step " in job.lines[-1]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`wrong_clock.c`, compiled."""
    path = tmp_path_factory.mktemp("clock") / "wrong_clock.so"
    source = Path(__file__).with_name("wrong_clock.c")
    words = ("cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(path), str(source), "-ldl")
    subprocess.run(words, check=True, timeout=600)
    return str(path)


def test_a_job_loses_the_first_host_and_another_one_whatever_their_clocks_say(tmp_path: Path, library: str) -> None:
    """Its report left out hosts whose clocks were an hour behind that of the host that wrote it."""
    options = ("--report", "report", "--log-dir", "logs")
    with hosts(4) as machines:
        made = WrongClocks(machines, tmp_path, "1:4", {"OMP_NUM_THREADS": "1"}, options)
        made.library = library
        for number, hours in enumerate((1, 0, -1, 0)):
            made.set_clock(number, hours)
        try:
            for number in range(4):
                made.start(number, 1, elastic_trainer.__file__)
                if number:
                    made.wait_connected(number)
            await_standbys(made, 0)
            made.wait_steps(0, 4)
            made.set_clock(1, 2)
            made.wait_steps(0, 4)
            machines[0].signal(signal.SIGKILL)
            leader = find_leader(made, 1, 2, 3)
            await_standbys(made, leader)
            made.set_clock(1, -5)
            made.wait_steps(leader, 4)
            machines[3].signal(signal.SIGKILL)
            made.wait_for(leader, "2 ranks on 2 hosts go on")
            made.wait_steps(leader, 4)
            (tmp_path / "over").touch()
            ends = made.ended(1, 2)
        finally:
            made.close()
    assert [end.code for end in ends] == [0, 0], ends[0].out
    told = Measurements.from_json((tmp_path / f"node-{leader}" / "report" / "report.json").read_text())
    assert abs(told.begun_unix - time.time()) > HOUR_S / 2  # so its clock was wrong
    assert [rank.host for rank in told.ranks] == ["node-1", "node-2"]
    assert [loss.host for loss in told.events] == ["node-0 (10.77.0.1)", "node-3 (10.77.0.4)"]
    assert 0 < told.events[0].at < told.events[1].at < told.duration_s
    last = told.steps
    assert told.num_matched > last
    restored = CheckpointManager(tmp_path / "checkpoints").load()
    assert restored is not None
    assert restored.step == last
    saves = [int(line.split()[0]) for line in (tmp_path / "saves").read_text().splitlines()]
    assert saves == sorted(set(saves))
    with open(tmp_path / "csv" / "metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == sorted(set(steps))
