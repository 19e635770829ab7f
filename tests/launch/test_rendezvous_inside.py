"""What a scheduler asks of `phalanx run` from the inside: several agents on one host, and ports that may be taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx._comm.control.key import Key

_AGENT = """
import os, sys, time
from phalanx._job.launch.command import report_errors, run_job
from phalanx._job.launch.plan_job import plan_job
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.agent.settings import Settings
from phalanx._job.agent.target import JobTarget
number, meet, script = int(sys.argv[1]), sys.argv[2], sys.argv[3]
common = dict(node_rank=number, leads=number == 0, min_nodes=2, max_nodes=2)
if meet.startswith("/"):
    def announce(path):
        with open(meet + ".draft", "w") as file:
            file.write(path)
        os.rename(meet + ".draft", meet)
    while number and not os.path.exists(meet):
        time.sleep(0.01)
    path = open(meet).read() if number else ""
    rendezvous = Rendezvous(path, is_local=True, announce=announce, **common)
else:
    first, *more = meet.split(",")
    rendezvous = Rendezvous(first, more_endpoints=tuple(more), **common)
target = JobTarget("script", script)
settings = Settings(target, nproc_per_node="1", run_id="job", rendezvous=rendezvous)
sys.exit(report_errors(lambda: run_job(plan_job(settings, os.environ))))
"""
_SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("phalanx")
x = torch.ones(1)
dist.all_reduce(x)
print("sum", x.item(), os.environ["RANK"], os.environ["GROUP_WORLD_SIZE"])
dist.destroy_process_group()
"""


def _run_two(tmp_path: Path, meet: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environ = {**os.environ, "PHALANX_KEY": str(Key(bytes(32)))}
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", _AGENT, str(number), meet, str(script)],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    said = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sorted(line.partition("sum ")[2] for line in said[0].splitlines() if "sum" in line) == ["2.0 0 2", "2.0 1 2"]
    return said


@pytest.mark.slow
def test_agents_of_one_host_are_one_job_without_a_port(tmp_path: Path) -> None:
    _run_two(tmp_path, str(tmp_path / "meet"))


@pytest.mark.slow
def test_a_port_that_somebody_has_is_passed_over_by_all(tmp_path: Path) -> None:
    with socket.socket() as taken, socket.create_server(("127.0.0.1", 0)) as free:
        taken.bind(("127.0.0.1", 0))  # and does not listen: one that listened, and said nothing, would cost 20 s
        ports = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        _run_two(tmp_path, ",".join(f"127.0.0.1:{port}" for port in ports))
