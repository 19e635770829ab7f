"""The first host of an elastic job is lost, another one leads, and the first one's command is typed again, unchanged.

It finds the job that goes on, as a host does that a scheduler requeues, or a pod that starts again. Real processes in
network namespaces; the ranks are those of `elastic_rank.py`, which speak the protocol.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.elastic_hosts import Cluster, cluster
from tests.system.standbys import WAITS, address_of, await_standbys, find_leader

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

JOINS = "this job goes on already, and the host at 10.77.0."
PORT = "29479"


def finish(made: Cluster, leader: int, *others: int) -> None:
    made.jobs[leader].order("finish")
    ends = made.ended(leader, *others)
    assert [end.code for end in ends] == [0] * len(ends), "\n".join(end.out for end in ends)


def test_the_first_host_that_was_killed_comes_back_into_its_job_by_the_same_command(tmp_path: Path) -> None:
    """It began a job of its own, and waited there for hosts that never came."""
    with cluster(tmp_path, 1, 1, 1, nnodes="1:3", env=WAITS) as made:
        await_standbys(made, 0)
        made.kill(0)
        leader = find_leader(made, 1, 2)
        made.start(0, 1)
        made.wait_for(0, JOINS)
        made.jobs[leader].wait(r"generation [12] as \d of 3 ", 3)
        finish(made, leader, 0, 3 - leader)


@pytest.mark.slow
def test_the_first_host_that_was_told_to_leave_comes_back_and_may_lead_again(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, 1, nnodes="1:3", env=WAITS) as made:
        await_standbys(made, 0)
        made.jobs[0].running.process.terminate()
        assert made.ended_one(0).code == 128 + signal.SIGTERM
        second = find_leader(made, 1, 2)
        made.start(0, 1)
        made.jobs[second].wait_generation(2, 3)
        await_standbys(made, second)
        made.kill(second)
        third = find_leader(made, 0, 3 - second)
        made.start(second, 1)  # at the address of the first host, which says where the job is led now
        made.jobs[third].wait(r"generation [34] as \d of 3 ", 3)
        finish(made, third, second, 3 - second - third)


@pytest.mark.slow
def test_hosts_that_wait_at_the_address_of_the_first_are_sent_on_when_that_is_back(tmp_path: Path) -> None:
    """Of four hosts the first and another one are requeued, and the other one comes before the first.

    The first one wrote a report of a job that had failed, in the place of that of the job that goes on.
    """
    report = tmp_path / "report"
    options = ("--report", str(report))
    with cluster(tmp_path, 1, 1, 1, 1, nnodes="1:4", env=WAITS, options=options) as made:
        await_standbys(made, 0)
        made.kill(0)
        leader = find_leader(made, 1, 2, 3)
        made.wait_for(leader, "3 ranks on 3 hosts go on")
        other = next(number for number in (1, 2, 3) if number != leader)
        made.kill(other)
        made.wait_for(leader, "2 ranks on 2 hosts go on")
        before = json.loads((report / "job.json").read_text())
        made.start(other, 1)
        made.wait_for(other, "waiting for the first host")
        made.start(0, 1)
        made.wait_for(0, JOINS)
        made.jobs[leader].wait(r"generation \d as \d of 4 ", 4)
        assert json.loads((report / "job.json").read_text()) == before
        finish(made, leader, *({0, 1, 2, 3} - {leader}))


@pytest.mark.slow
def test_another_command_at_the_address_where_a_job_began_begins_a_job_of_its_own_and_says_so(tmp_path: Path) -> None:
    another = tmp_path / "another.py"
    another.write_text("print('another job')")
    options = ("--rdzv-conf", "last_call_timeout=5")
    with cluster(tmp_path, 1, 1, 1, nnodes="1:3", env=WAITS, options=options) as made:
        await_standbys(made, 0)
        made.kill(0)
        leader = find_leader(made, 1, 2)
        made.start(0, 1, str(another))
        made.wait_for(0, "another job that began at this address, ")
        end = made.ended_one(0)
        assert end.code == 0
        assert "another job" in end.out.splitlines()[-1]
        assert "This command begins a job of its own" in end.out
        assert f"the host at {address_of(made.jobs[leader])} leads it" in end.out
        finish(made, leader, 3 - leader)


NOTICE = """
import sys, time
from phalanx._comm.control.key import Key
from phalanx._job.hosts.succession.moved_job import LeaderNotice
notice = LeaderNotice([sys.argv[1]], Key(bytes(32)), sys.argv[2])
sys.stdin.read()
notice.close()
"""


@contextlib.contextmanager
def noticed(made: Cluster, address: str) -> Iterator[None]:
    """Inside, a process on the second host says at the first that the job is led at `address`."""
    where = f"{made.machines[0].address}:{PORT}"
    line = [*made.machines[1].command, sys.executable, "-c", NOTICE, where, address]
    with subprocess.Popen(line, stdin=subprocess.PIPE) as notice:
        try:
            yield
        finally:
            notice.communicate()


@pytest.mark.slow
def test_a_first_host_that_does_not_reach_the_one_that_leads_now_says_so_and_begins_nothing(tmp_path: Path) -> None:
    with hosts(2, both_ways=True) as machines, contextlib.closing(Cluster(machines, tmp_path, "1:3", WAITS)) as made:
        nobody = f"{machines[1].address}:1"
        made.start(0, 1)
        with noticed(made, nobody):
            end = made.ended_one(0)
    assert end.code == 1
    assert f"is led by the host at {nobody}, which this host does not reach" in end.out
    assert "open the way there (firewall), and type the command again" in end.out
    assert "joined 0" not in end.out


@pytest.mark.slow
def test_a_first_host_that_trains_before_it_is_told_says_what_to_type(tmp_path: Path) -> None:
    options = ("--no-preload", "--rdzv-conf", "last_call_timeout=0")
    with (
        hosts(2, both_ways=True) as machines,
        contextlib.closing(Cluster(machines, tmp_path, "1:3", WAITS, options)) as made,
    ):
        made.start(0, 1)
        made.first.wait_joined(0, 0)
        with noticed(made, "10.77.0.2:41873"):
            made.wait_for(0, "this one trains beside it. If it is the same, end this command and type: phalanx join 10")
        (end,) = made.finish(0)
    assert end.code == 0
