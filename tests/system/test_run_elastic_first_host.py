"""An elastic job continues when the host that leads it is lost or told to leave, and takes it in when it comes back.

Real processes in network namespaces; the ranks are those of `elastic_rank.py`, which speak the protocol and do nothing
else; the last tests train.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system import elastic_servers, elastic_training
from tests.system.elastic_hosts import Cluster, cluster, samples_of_epochs, wait_for_files
from tests.system.elastic_job import SCRIPT
from tests.system.phalanx_command import Finished
from tests.system.standbys import ONE_WAY, WAITS, address_of, await_standbys, find_leader

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


JOINS = "this job is already running, led by the host at 10.77.0."
PORT = "29479"
LEFT = 128 + signal.SIGTERM


def tell_to_leave(made: Cluster, *numbers: int) -> None:
    for number in numbers:
        made.jobs[number].running.process.terminate()


def require_in_order(left: Finished, *others: Finished) -> None:
    """Nothing was lost: the host has left, and the others have ended well."""
    assert left.code == LEFT, left.out
    assert "this host has left the job, which continues on the others" in left.out
    assert [end.code for end in others] == [0] * len(others), others[0].out
    for end in (left, *others):
        assert " is lost: " not in end.out
        assert "was lost during the run" not in end.out


def finish(made: Cluster, leader: int, *others: int) -> list[Finished]:
    """Have all ranks end well, as these hosts have to."""
    made.jobs[leader].order("finish")
    ends = made.ended(leader, *others)
    assert [end.code for end in ends] == [0] * len(ends), "\n".join(end.out for end in ends)
    return ends


def wait_for_path(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def test_a_job_goes_on_without_its_first_host_and_its_successor_shows_what_all_print(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 2, 1, nnodes="1:3", env=WAITS) as made:
        await_standbys(made, 0)
        made.kill(0)
        leader = find_leader(made, 1, 2)
        made.jobs[leader].wait_generation(1, 3)
        ends = finish(made, leader, 3 - leader)
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
        made.wait_for(leader, "3 ranks continue, ")
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
    assert "it reaches 1 of the 3 hosts that were in the job together (2 are needed)" in first.out
    assert "It stops its ranks, so that the job does not split in two" in first.out
    assert "generation 1" not in first.out
    assert [end.code for end in ends] == [0, 0], ends[0].out


@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_first_host_and_another_one_goes_on_waiting(tmp_path: Path) -> None:
    """They ended with the first host, and the job went on with fewer ranks."""
    with cluster(tmp_path, 1, 1, 1, nnodes="2:3", spare=2, env=WAITS) as made:
        await_standbys(made, 0)
        for number in (3, 4):
            made.start(number, 1)
            made.wait_for(number, "this host waits, to replace one that is lost")
        made.kill(0)
        leader = find_leader(made, 1, 2)
        made.jobs[leader].wait(r"generation [12] as \d of 3 ", 3)  # at once, or a moment after the others go on
        for number in (3, 4):
            made.wait_for(number, "leads the job now; this host waits there")
        ends = finish(made, leader, 3 - leader, 3, 4)
    assert "3 ranks on 3 hosts continue" in ends[0].out


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
        made.wait_for(leader, "accepted; 3 ranks on 3 hosts continue")
        made.wait_for(leader, "as 2 of 3")
        finish(made, leader, 3 - leader, 3)


@pytest.mark.slow
def test_the_first_host_is_told_to_leave_and_the_others_go_on_in_the_same_processes(tmp_path: Path) -> None:
    """A SIGTERM at the first host ended the job on all of them."""
    with cluster(tmp_path, 2, 1, 1, nnodes="1:3", env=WAITS) as made:
        await_standbys(made, 0)
        tell_to_leave(made, 0)
        left = made.ended_one(0)
        leader = find_leader(made, 1, 2)
        made.join(0, address_of(made.jobs[leader]))
        made.jobs[leader].wait_generation(2, 4)
        made.jobs[leader].order("finish")
        ends = made.ended(leader, *({0, 1, 2} - {leader}))
    require_in_order(left, *ends)
    assert "with ranks 0, 1, leaves after this step (SIGTERM); 2 ranks on 2 hosts continue" in left.out
    assert "the host that leads the job leaves (SIGTERM). The others elect another leader" in ends[0].out
    assert "finished" in ends[0].out
    started = re.findall(r"joined 2 as (\d) of 4", ends[0].out)  # of the others nobody was started again
    assert sorted(started) == sorted(re.findall(r"joined \d+ as (\d) of", ends[0].out)) == ["0", "1"]


@pytest.mark.slow
def test_a_scheduler_that_tells_all_hosts_to_end_ends_the_job(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, 1, nnodes="1:3", env=WAITS) as made:
        await_standbys(made, 0)
        tell_to_leave(made, 0, 1, 2)
        ends = made.ended(0, 1, 2)
    assert ends[0].code == LEFT, ends[0].out
    assert all(end.code for end in ends)
    assert not any("leads the job now" in end.out for end in ends)


@pytest.mark.slow
def test_a_second_sigterm_at_the_first_host_stops_the_job_on_all_hosts(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, 1, nnodes="1:3", env=WAITS) as made:
        await_standbys(made, 0)
        tell_to_leave(made, 0)
        made.wait_for(0, "SIGTERM: this host leaves, unless all other hosts also receive SIGTERM within 2 s")
        tell_to_leave(made, 0)
        ends = made.ended(0, 1, 2)
    assert [end.code for end in ends] == [LEFT] * 3, ends[0].out
    assert "SIGTERM: stopping 3 ranks" in ends[0].out


@pytest.mark.slow
def test_without_enough_hosts_to_choose_another_one_a_sigterm_at_the_first_ends_the_job(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, nnodes="1:2", env=WAITS) as made:
        tell_to_leave(made, 0)
        ends = made.ended(0, 1)
    assert [end.code for end in ends] == [LEFT] * 2, ends[0].out
    assert "SIGTERM: stopping 2 ranks" in ends[0].out


@pytest.mark.slow
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
    """Two of four hosts are requeued, the first of the job among them; the other one comes back before it.

    The first host wrote the report of a failed job over that of the job that continued.
    """
    report = tmp_path / "report"
    options = ("--report", str(report))
    with cluster(tmp_path, 1, 1, 1, 1, nnodes="1:4", env=WAITS, options=options) as made:
        await_standbys(made, 0)
        made.kill(0)
        leader = find_leader(made, 1, 2, 3)
        made.wait_for(leader, "3 ranks on 3 hosts continue")
        other = next(number for number in (1, 2, 3) if number != leader)
        made.kill(other)
        made.wait_for(leader, "2 ranks on 2 hosts continue")
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
        assert "This command starts a job of its own" in end.out
        assert f"the host at {address_of(made.jobs[leader])} leads it" in end.out
        finish(made, leader, 3 - leader)


NOTICE = """
import sys, time
from phalanx._comm.control.key import Key
from phalanx._job.hosts.succession.leader_notice import LeaderNotice
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
    assert f"is led by the host at {nobody}, which this host cannot reach" in end.out
    assert "open the firewall to that host, and run the command again" in end.out
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
            made.wait_for(0, "this job trains too. If it is the same job, end this command and type: phalanx join 10")
        (end,) = made.finish(0)
    assert end.code == 0


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
                made.wait_for(0, "the ranks of this host finish their step and exit")
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
