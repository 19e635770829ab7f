"""The first host is lost, and what was told to it alone goes on at its successor: real training on hosts apart.

Each host has a name of its own, and in one folder a disk of its own; what the program itself writes is shared.
"""

from __future__ import annotations

import csv
import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.system import elastic_trainer
from tests.system.hosts_apart import HostsApart
from tests.system.phalanx_command import Finished, run
from tests.system.standbys import await_standbys, find_leader

from phalanx import CheckpointManager
from phalanx._job.report.job_record import JobRecord
from phalanx._job.report.measurements import Measurements
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

pytestmark = [pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()), pytest.mark.slow]

SCRIPT = elastic_trainer.__file__


@dataclass
class Lost:
    """A job that has lost its first host: what was seen while it went on, and what it left behind."""

    folder: Path
    leader: int
    pids: dict[int, int]  # the processes of the ranks, by the hosts' numbers
    agents: dict[int, int]  # the commands, by the hosts' numbers
    top: dict[int, str]  # what `phalanx top --once` said, by the hosts' numbers
    seen: dict[str, Any]  # what `phalanx top --json` said on the leader
    stacks: str
    metrics: str  # what a scraper read on the leader
    rest: str  # what `phalanx report` said on the lost host
    begun: JobRecord  # what stood in the leader's report while the job went on
    ends: dict[int, Finished]

    @property
    def last_step(self) -> int:
        return int(re.findall(r"stopped at (\d+) as", self.ends[self.leader].out)[0])

    def at(self, number: int) -> Path:
        """The folder of a host's own."""
        return self.folder / f"node-{number}"


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """Three hosts train, one of which came by `phalanx join`; the first is killed with all that runs on it, and the
    others go on for a while.
    """
    folder = tmp_path_factory.mktemp("lost")
    options = ("--report", "report", "--log-dir", "logs", "--metrics", ":0")
    with hosts(3) as machines:
        made = HostsApart(machines, folder, "1:3", {"OMP_NUM_THREADS": "1"}, options)
        try:
            made.start(0, 1, SCRIPT)
            made.wait_for(0, "waiting for more hosts at")
            made.join(1, "10.77.0.1:29479")
            made.wait_connected(1)
            made.start(2, 1, SCRIPT)
            await_standbys(made, 0)
            made.first.wait(r"step \d+ pid \d+", 6)
            pids = {int(line[1]): int(line[4]) for line in map(_read_step, made.first.lines) if line}
            machines[0].signal(signal.SIGKILL)
            leader = find_leader(made, 1, 2)
            before = len(made.jobs[leader].lines)
            while sum(bool(_read_step(line)) for line in made.jobs[leader].lines[before:]) < 8:
                made.jobs[leader].lines.append(made.jobs[leader].running.read_until("").rstrip("\n"))
            agents = {number: made.pid(number) for number in range(3)}
            top = {number: made.ask(number, "top", "--once", str(made.pid(number))) for number in (1, 2)}
            seen = json.loads(made.ask(leader, "top", "--json", str(made.pid(leader))))
            stacks = made.ask(leader, "stacks", str(made.pid(leader)))
            metrics = made.scrape(leader)
            begun = JobRecord.read(str(folder / f"node-{leader}" / "report"))
            assert begun is not None
            (folder / "over").touch()
            ends = dict(zip((0, 1, 2), made.ended(0, 1, 2), strict=True))
            rest = made.ask(0, "report", "report")
        finally:
            made.close()
    assert [ends[1].code, ends[2].code] == [0, 0], ends[leader].out
    return Lost(folder, leader, pids, agents, top, seen, stacks, metrics, rest, begun, ends)


def _read_step(line: str) -> re.Match[str] | None:
    """The host's number, the step and the process in a line of `elastic_trainer`."""
    return re.match(r"\[\d node-(\d)( .*)?\] step (\d+) pid (\d+)$", line)


def test_its_report_tells_the_whole_time_and_says_what_went_with_the_host(lost: Lost) -> None:
    """It began as that host had come, and said nothing of the ranks whose records are missing."""
    report = lost.at(lost.leader) / "report"
    told = Measurements.from_json((report / "report.json").read_text())
    first = JobRecord.read(str(lost.at(0) / "report"))
    assert first is not None
    assert (told.end, told.exit_code, told.world_size, told.steps) == ("well", 0, 3, lost.last_step)
    assert told.begun_unix == pytest.approx(first.begun_unix, abs=0.5)
    assert {(rank.host, rank.pid) for rank in told.ranks} == {(f"node-{n}", lost.pids[n]) for n in (1, 2)}
    (loss,) = told.events
    assert (loss.kind, loss.rank, loss.pid, loss.host) == ("loss", 0, lost.pids[0], "node-0 (10.77.0.1)")
    assert "is lost: the coordinator at 10.77.0.1:29479 has ended" in loss.text
    page = (report / "report.html").read_text()
    assert "The records of rank 0 were lost with the host node-0 (10.77.0.1)" in page
    assert "Rank 0 was lost, and the others continued" in page
    assert f"the report is in {lost.folder / 'disk' / 'report' / 'report.html'}" in lost.ends[lost.leader].out
    assert "the report is in" not in lost.ends[3 - lost.leader].out
    assert "elastic_trainer.py: killed" in lost.rest


def test_all_ranks_lines_are_shown_and_kept_in_each_hosts_files(lost: Lost) -> None:
    shown = [line for number in (0, lost.leader) for line in lost.ends[number].out.splitlines()]
    steps = range(elastic_trainer.PRINT_EVERY, lost.last_step + 1, elastic_trainer.PRINT_EVERY)
    for number in (1, 2):
        seen = {int(line[3]) for line in map(_read_step, shown) if line and line[1] == str(number)}
        assert seen >= set(steps), number
        kept = (lost.at(number) / "logs" / f"rank_{number}.log").read_text()
        assert {int(step) for step in re.findall(r"step (\d+) pid", kept)} >= set(steps)
    assert not any(map(_read_step, lost.ends[3 - lost.leader].out.splitlines()))
    flight = json.loads((lost.at(lost.leader) / "logs" / "flight.json").read_text())
    assert {str(pid) for pid in (lost.pids[1], lost.pids[2])} <= set(re.findall(r"\d+", json.dumps(flight)))


def test_top_and_stacks_show_all_ranks_there(lost: Lost) -> None:
    """On how many hosts was said as of the start."""
    seen = lost.seen
    assert (seen["num_hosts"], seen["pid"]) == (2, lost.agents[lost.leader])
    assert [(rank["host"].split()[0], rank["pid"]) for rank in seen["ranks"]] == [
        (f"node-{n}", lost.pids[n]) for n in (1, 2)
    ]
    assert [(each["rank"], each["pid"]) for each in seen["lost"]] == [(0, lost.pids[0])]
    assert "2 of 3 ranks running on 2 hosts" in lost.top[lost.leader]
    other = lost.top[3 - lost.leader]
    assert "Ranks of 1 other host are shown on the host that leads the job" in other
    for number in (1, 2):
        assert f"(pid {lost.pids[number]})" in lost.stacks


def test_its_metrics_are_those_of_all_hosts(lost: Lost) -> None:
    """A host that had come by `phalanx join` served none."""
    values = dict(re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", lost.metrics, re.M))
    assert float(values["phalanx_hosts"]) == 2
    assert float(values["phalanx_ranks_lost_total"]) == 1
    assert {key for key in values if key.startswith("phalanx_rank_step{")} == {
        f'phalanx_rank_step{{rank="{rank["rank"]}",host="{rank["host"]}"}}' for rank in lost.seen["ranks"]
    }
    assert all("metrics at http://127.0.0.1:" in end.out for end in lost.ends.values())


def test_one_rank_saves_and_the_next_start_goes_on_from_the_newest_checkpoint(lost: Lost) -> None:
    saves = [line.split() for line in (lost.folder / "saves").read_text().splitlines()]
    steps = [int(step) for step, _ in saves]
    assert steps == sorted(set(steps))  # each by one process, in order
    assert set(range(1, lost.last_step + 1)) - set(steps) <= {
        steps[_change(saves)] - 1
    }  # during which the host was lost
    assert [int(pid) for _, pid in saves] == sorted(
        (int(pid) for _, pid in saves), key=[lost.pids[0], lost.pids[lost.leader]].index
    )
    for step, pid in saves:
        kept = torch.load(lost.folder / f"saved-{step}", weights_only=True)
        assert kept == {"step": int(step), "pid": int(pid)}
    checkpoints = lost.folder / "checkpoints"
    assert [path.name for path in checkpoints.glob(".*")] == []  # a draft of the host that is lost was removed
    manager = CheckpointManager(checkpoints)
    assert len(manager.checkpoints()) == 3
    restored = manager.load()
    assert restored is not None
    assert restored.step == lost.last_step
    again = run("--nproc-per-node", "2", SCRIPT, str(lost.folder))
    assert again.code == 0, again.err
    assert f"step-{lost.last_step}, after step {lost.last_step}, in epoch" in again.out


def _change(saves: list[list[str]]) -> int:
    """The first save by another process than the first one."""
    return next(at for at, (_, pid) in enumerate(saves) if pid != saves[0][1])


def test_progress_and_loggers_go_on(lost: Lost) -> None:
    shown = [line for number in (0, lost.leader) for line in lost.ends[number].out.splitlines()]
    lines = [re.match(r"\[\d node-(\d)\] epoch (\d+)/", line) for line in shown]
    epochs = [(int(line[2]), int(line[1])) for line in lines if line]
    numbers = [epoch for epoch, _ in epochs]
    assert numbers == sorted(set(numbers))
    before = max(epoch for epoch, node in epochs if node == 0)
    # Of the epoch in which the host was lost there may have been no batch left.
    assert set(range(1, numbers[-1] + 1)) - set(numbers) <= {before + 1}
    assert {node for epoch, node in epochs if epoch > before} == {lost.leader}
    with open(lost.folder / "csv" / "metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if int(row["step"]) <= lost.last_step]
    assert steps == sorted(set(steps))
    assert len(steps) >= lost.last_step - 1
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(lost.folder / "tensorboard"), size_guidance={events.SCALARS: 0}).Reload()
    curve = [point.step for point in read.Scalars("train/loss") if point.step <= lost.last_step]
    assert sorted(curve) == sorted(set(curve))
    assert len(curve) >= lost.last_step - 1
