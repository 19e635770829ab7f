"""An elastic job goes on when the host that leads it is lost: real processes in network namespaces.

The ranks are those of `elastic_rank.py`, which speak the protocol and do nothing else; the last test trains.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.system import elastic_servers, elastic_training
from tests.system.elastic_hosts import Cluster, cluster, samples_of_epochs, wait_for_files
from tests.system.elastic_job import SCRIPT
from tests.system.standbys import ONE_WAY, WAITS, address_of, await_standbys, find_leader

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


def wait_for_path(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def test_a_job_goes_on_without_its_first_host_and_its_successor_shows_what_all_print(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 2, 1, nnodes="1:3", env=WAITS) as made:
        await_standbys(made, 0)
        made.kill(0)
        leader = find_leader(made, 1, 2)
        made.jobs[leader].wait_generation(1, 3)
        made.jobs[leader].order("finish")
        ends = made.ended(leader, 3 - leader)
    assert [end.code for end in ends] == [0, 0], ends[0].out
    assert "with rank 0, is lost: the coordinator at 10.77.0.1:29479 has ended" in ends[0].out
    assert "1 rank was lost during the run" in ends[0].out
    assert "finished" in ends[0].out
    assert "finished" not in ends[1].out


@pytest.mark.slow
def test_a_host_joins_the_successor_which_is_lost_later_and_the_job_still_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, 1, nnodes="1:3", env=WAITS) as made:
        await_standbys(made, 0)
        made.kill(0)
        second = find_leader(made, 1, 2)
        made.jobs[second].wait_generation(1, 2)
        made.join(0, address_of(made.jobs[second]))
        made.jobs[second].wait_generation(2, 3)
        await_standbys(made, second)
        made.kill(second)
        third = find_leader(made, 0, 3 - second)
        made.jobs[third].wait_generation(3, 2)
        made.jobs[third].order("finish")
        ends = made.ended(*{0, 3 - second})
    assert [end.code for end in ends] == [0, 0], ends[0].out


@pytest.mark.slow
def test_two_of_five_hosts_are_lost_at_once_the_first_one_and_its_successor(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, 1, 1, 1, nnodes="1:5", env=WAITS, options=("--host-timeout", "3")) as made:
        await_standbys(made, 0, count=2)
        for number in (0, 1):
            made.kill(number)
        leader = find_leader(made, 2, 3, 4)
        made.wait_for(leader, "3 ranks go on, ")
        made.jobs[leader].order("finish")
        ends = made.ended(2, 3, 4)
    assert [end.code for end in ends] == [0, 0, 0], ends[0].out


@pytest.mark.slow
def test_after_a_failure_the_host_that_leads_now_starts_all_ranks_again_as_often_as_max_restarts_allows(
    tmp_path: Path,
) -> None:
    """The job ended with the failure."""
    options = ("--max-restarts", "3", "--rdzv-conf", "last_call_timeout=10")
    with cluster(tmp_path, 1, 1, 1, nnodes="1:3", env={**WAITS, "NO_STEPS": "1"}, options=options) as made:
        await_standbys(made, 0)
        made.kill(0)
        leader = find_leader(made, 1, 2)
        job = made.jobs[leader]
        job.wait_generation(1, 2)
        job.order("raise-1")  # twice at one step: that is no loss any more
        job.wait("joined 2 as 1 of 2 ")
        job.wait_generation(2, 2)
        job.order("raise-1")
        made.wait_for(leader, "starting all 2 ranks again (")
        job.wait_joined(0, 0, 1)
        job.order("finish")
        ends = made.ended(leader, 3 - leader)
    assert [end.code for end in ends] == [0, 0], ends[0].out


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "heard by nobody", "deaf to all"])
def test_a_first_host_that_falls_silent_is_out_and_ends_when_it_is_back(tmp_path: Path, how: str) -> None:
    with cluster(tmp_path, 1, 1, 1, nnodes="1:3", env=WAITS, options=("--host-timeout", "3")) as made:
        await_standbys(made, 0)
        if how == "stopped":
            os.kill(made.first.running.process.pid, signal.SIGSTOP)
        else:
            made.machines[0].cut_off(ONE_WAY.get(how, ""))
        leader = find_leader(made, 1, 2)
        made.jobs[leader].wait_generation(1, 2)
        if how == "stopped":
            os.kill(made.first.running.process.pid, signal.SIGCONT)
        else:
            made.machines[0].plug_in()
        first = made.ended_one(0)
        made.jobs[leader].order("finish")
        ends = made.ended(1, 2)
    assert first.code == 1
    assert "it hears 1 of the 3 hosts that were in the job together, of which 2 are needed" in first.out
    assert "Its ranks are ended, so that no two halves train" in first.out
    assert "generation 1" not in first.out
    assert [end.code for end in ends] == [0, 0], ends[0].out


@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_first_host_and_another_one_goes_on_waiting(tmp_path: Path) -> None:
    """They ended with the first host, and the job went on with fewer ranks."""
    with cluster(tmp_path, 1, 1, 1, nnodes="2:3", spare=2, env=WAITS) as made:
        await_standbys(made, 0)
        for number in (3, 4):
            made.start(number, 1)
            made.wait_for(number, "this one waits, to take the place of one that is lost")
        made.kill(0)
        leader = find_leader(made, 1, 2)
        made.jobs[leader].wait(r"generation [12] as \d of 3 ", 3)  # at once, or a moment after the others go on
        for number in (3, 4):
            made.wait_for(number, "leads the job now; this host waits there")
        made.jobs[leader].order("finish")
        ends = made.ended(leader, 3 - leader, 3, 4)
    assert [end.code for end in ends] == [0, 0, 0, 0], ends[0].out
    assert "3 ranks on 3 hosts go on" in ends[0].out


@pytest.mark.slow
def test_a_host_whose_ranks_start_as_the_first_host_is_lost_comes_to_the_one_that_leads_then(tmp_path: Path) -> None:
    """It ended with the first host."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import os, runpy, sys\n"
        "open(os.path.join(sys.argv[1], 'starts'), 'w').close()\n"
        "open(os.path.join(sys.argv[1], 'come')).close()\n"  # which waits until the test opens it as well
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    )
    os.mkfifo(tmp_path / "come")
    with cluster(tmp_path, 1, 1, 1, nnodes="2:4", spare=1, env=WAITS) as made:
        await_standbys(made, 0)
        made.start(3, 1, str(slow))
        wait_for_files(made.first, [tmp_path / "starts"])
        made.kill(0)
        leader = find_leader(made, 1, 2)
        made.wait_for(3, "leads the job now; this host waits there")
        (tmp_path / "come").open("w").close()
        made.wait_for(leader, "taken in; 3 ranks on 3 hosts go on")
        made.wait_for(leader, "as 2 of 3")
        made.jobs[leader].order("finish")
        ends = made.ended(leader, 3 - leader, 3)
    assert [end.code for end in ends] == [0, 0, 0], ends[0].out


def train(machines: list[Host], folder: Path, what: str = "") -> list[str]:
    """Return the weights of three ranks on three hosts.

    With "lost" or "left" another host replaces the first one at step 3; with "cut" a rank is killed then, and at step 6
    a link is cut for longer than an operation may take: nobody has died, and all form the group again.
    """
    folder.mkdir()
    made = Cluster(machines, folder, "3", {"OMP_NUM_THREADS": "1", "OPERATION_S": "3" if what == "cut" else "200"}, ())
    try:
        for number in range(3):
            made.start(number, 1, elastic_training.__file__)
        found = made.first.wait(r"rank (\d) is at step 3, pid (\d+)", 3)
        leader, hosts_left = 0, {0, 1, 2}
        if what in ("lost", "left"):
            await_standbys(made, 0)
            made.jobs[0].running.process.send_signal(signal.SIGTERM if what == "left" else signal.SIGKILL)
            if what == "left":
                made.wait_for(0, "the ranks of this host finish their step and end")
                made.first.order("go-3")
                made.first.order("go-6")
            leader, hosts_left = find_leader(made, 1, 2), {1, 2, 3}
            made.join(3, address_of(made.jobs[leader]))
            assert what != "left" or made.ended_one(0).code == 128 + signal.SIGTERM
        if what == "cut":
            os.kill({int(match[1]): int(match[2]) for match in found}[1], signal.SIGKILL)
        made.jobs[leader].order("go-3")
        if what == "cut":
            made.first.wait(r"rank \d is at step 6, pid \d+", 3)
            machines[2].cut_off()
        made.jobs[leader].order("go-6")
        if what == "cut":
            wait_for_files(made.first, [folder / f"left-1-{rank}" for rank in (0, 1)])
            machines[2].plug_in()
        ends = made.ended(leader, *(hosts_left - {leader}))
        assert [end.code for end in ends] == [0] * 3, "\n".join(end.out for end in ends)
    finally:
        made.close()
    assert samples_of_epochs(folder) == [list(range(elastic_training.SAMPLES))] * elastic_training.EPOCHS
    descriptors = [int(path.read_text()) for path in folder.glob("open-*")]
    assert what != "cut" or max(descriptors) - min(descriptors) < 8, descriptors  # a connection is 12
    return [(folder / f"weights-{rank}").read_text() for rank in range(3)]


@pytest.mark.slow
def test_training_that_loses_hosts_ranks_or_a_link_has_the_bits_of_an_undisturbed_run_and_each_sample_once(
    tmp_path: Path,
) -> None:
    with hosts(4) as machines:
        quiet = train(machines, tmp_path / "quiet")
        for what in ("lost", "left", "cut"):
            assert train(machines, tmp_path / what, what) == quiet, what


@pytest.mark.slow
def test_each_step_of_each_trainer_counts_once_when_the_first_host_is_lost_with_a_trainer_and_a_server(
    tmp_path: Path,
) -> None:
    """The servers are no ranks of the job; the store in which they meet the trainers is on a host of its own."""
    with hosts(5) as machines, contextlib.ExitStack() as stack:
        address = f"{machines[4].address}:29513"
        made = Cluster(machines, tmp_path, "3", {"OMP_NUM_THREADS": "1"}, ())
        stack.callback(made.close)
        line = (sys.executable, elastic_servers.__file__, str(tmp_path), address)
        env = {**os.environ, **made.environ}

        def begin(number: int, word: str) -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen([*machines[number].command, *line, word], env=env))
            stack.callback(process.kill)
            return process

        begin(4, "store")
        wait_for_path(tmp_path / "there")
        servers = []
        for number in range(3):
            servers.append(begin(number, str(number)))
            wait_for_path(tmp_path / f"serves-{number}")
            made.start(number, 1, elastic_servers.__file__, address)
            if number:
                made.wait_connected(number)  # they have their ranks in the order in which they come
        await_standbys(made, 0)
        wait_for_files(made.first, [tmp_path / "struck"])
        machines[0].signal(signal.SIGKILL)
        assert servers[0].wait() == -signal.SIGKILL
        leader = find_leader(made, 1, 2)
        made.join(3, address_of(made.jobs[leader]))
        ends = made.ended(leader, *({1, 2, 3} - {leader}))
        (tmp_path / "over").touch()
    assert [end.code for end in ends] == [0, 0, 0], "\n".join(end.out for end in ends)
    told = "dense [-60.0, -60.0, -60.0] rows [-60.0, -60.0, -60.0, -20.0, -20.0, -20.0, 0.0] step 20"
    assert told in ends[0].out
    steps = re.findall(r"goes on at step (\d+) of generation [1-9]", ends[0].out)
    assert set(steps) <= {"7", "8"}, ends[0].out  # those that were not lost have pushed one more, or not yet
    assert steps, ends[0].out
