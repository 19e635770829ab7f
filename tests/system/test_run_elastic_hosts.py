"""An elastic job on several hosts loses ranks, hosts and links and goes on: real processes in network namespaces.

The ranks are those of `elastic_rank.py`, which speak the protocol and do nothing else.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.elastic.programs import differences
from tests.system.elastic_hosts import Cluster, cluster
from tests.system.phalanx_command import write_script

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


@pytest.mark.slow
def test_ranks_of_any_host_are_replaced_also_the_only_one_and_the_first(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, 1, nnodes="2") as made:
        made.first.kill(2)
        made.first.wait_joined(1, 2)
        made.first.wait_generation(1, 3)
        made.first.kill(0)
        made.first.wait_joined(2, 0)
        made.first.wait_generation(2, 3)
        first, second = made.finish(0, 1)
    assert (first.code, second.code) == (0, 0), first.out
    assert first.out.count("3 ranks continue, ") == 2
    assert re.search(r"rank 2 \(pid \d+\) is lost: SIGKILL", first.out)


@pytest.mark.slow
def test_a_job_goes_on_without_a_lost_host_and_takes_it_in_when_it_comes_back(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, 1, nnodes="1:3") as made:
        made.kill(1)
        made.first.wait_generation(1, 2)  # what was rank 2 may be 1 now
        made.start(1, 1)
        made.first.wait(r"joined 2 as \d of 3")
        made.first.wait_generation(2, 3)
        first, back, third = made.finish(0, 1, 2)
    assert [first.code, back.code, third.code] == [0, 0, 0], first.out
    assert "2 ranks on 2 hosts continue" in first.out
    assert "accepted; 3 ranks on 3 hosts continue" in first.out
    assert "1 rank was lost during the run" in first.out
    assert "First failure" not in first.out


@pytest.mark.slow
def test_a_spare_that_dies_while_it_waits_is_told_at_once_and_another_one_has_its_place(tmp_path: Path) -> None:
    """Nobody was told, though the job counted on it. The silence of the network is not waited for: 9 s."""
    with cluster(tmp_path, 1, 1, nnodes="2", spare=2, options=("--host-timeout", "600")) as made:
        made.start(2, 1)
        made.wait_for(2, "this host waits, to replace one that is lost")
        made.kill(2)
        made.wait_for(0, "(10.77.0.3), which waited to join, is lost: ")
        made.jobs.pop(2)
        made.start(3, 1)
        made.wait_for(3, "this host waits, to replace one that is lost")
        made.kill(1)
        made.first.wait_generation(1, 2)
        first, spare = made.finish(0, 3)
    assert (first.code, spare.code) == (0, 0), first.out
    assert "2 ranks on 2 hosts continue: rank 1 is restarted" in first.out


@pytest.mark.slow
def test_a_host_that_is_told_to_leave_comes_back_into_the_same_job_and_no_other_rank_is_restarted(
    tmp_path: Path,
) -> None:
    """A SIGTERM at any of its hosts ended the job."""
    with cluster(tmp_path, 1, 2, 1, nnodes="1:3") as made:
        before = dict(made.first.pids)
        made.jobs[1].running.process.terminate()
        left = made.ended_one(1)
        made.first.wait_generation(1, 2)
        made.start(1, 2)
        made.first.wait_joined(2, 1, 2)
        made.first.wait_generation(2, 4)
        assert {rank: made.first.pids[rank] for rank in (0, 3)} == {rank: before[rank] for rank in (0, 3)}
        first, *others = made.finish(0, 1, 2)
    assert left.code == 128 + signal.SIGTERM, left.out
    assert [first.code, *(other.code for other in others)] == [0, 0, 0], first.out
    assert "with ranks 1, 2, leaves after this step (SIGTERM); 2 ranks on 2 hosts continue" in first.out
    assert "accepted; 4 ranks on 3 hosts continue" in first.out
    assert "is lost" not in first.out
    assert "was lost during the run" not in first.out


@pytest.mark.slow
def test_with_too_few_hosts_the_ranks_wait_then_save_and_end_with_a_code_of_their_own(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, nnodes="2", env={"WAIT_S": "1"}) as made:
        made.kill(1)
        made.first.wait("told to end: 1 of at least 2 hosts left, and no host has joined within 1 s")
        (first,) = made.ended(0)
    assert first.code == 75, first.out
    assert "1 of at least 2 hosts left: the ranks keep their state, and wait up to 1 s for more" in first.out
    assert "First failure" not in first.out


@pytest.mark.slow
def test_a_host_that_was_cut_off_comes_back_by_itself_with_its_link(tmp_path: Path) -> None:
    """It stopped its ranks, said that the first host was lost, and ended; and with it the job."""
    with cluster(tmp_path, 1, 2, nnodes="2", env={"WAIT_S": "600"}, options=("--host-timeout", "2")) as made:
        made.machines[1].cut_off()
        made.wait_for(0, "wait up to 600 s for more")
        made.wait_for(1, "waiting up to 600 s for the first host, to rejoin the job")
        made.machines[1].plug_in()
        made.first.wait_joined(1, 1, 2)
        made.first.wait_generation(1, 3)
        first, second = made.finish(0, 1)
    assert (first.code, second.code) == (0, 0), first.out
    assert "the first host answers again" in second.out


@pytest.mark.slow
def test_without_the_first_host_the_others_say_so_at_once_and_end(tmp_path: Path) -> None:
    """Not covered: it holds the coordinator, and decides. What the ranks of the others held is lost."""
    with cluster(tmp_path, 1, 1, nnodes="1:2", env={"WAIT_S": "600"}, options=("--host-timeout", "600")) as made:
        made.kill(0)
        (second,) = made.ended(1)
    assert second.code == 1
    assert "the first host is lost: the coordinator at 10.77.0.1:29479 has ended: its host answers" in second.out


@pytest.mark.slow
def test_a_host_whose_ranks_fail_as_they_start_is_sent_away_and_the_job_goes_on(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("raise ValueError('no data here')\n")
    with cluster(tmp_path, 1, nnodes="1:2", spare=1, options=("--rdzv-conf", "last_call_timeout=0")) as made:
        made.start(1, 1, str(bad))
        made.wait_for(0, "was rejected: a rank on it exited before it could join the group")
        assert made.ended_one(1).code == 1
        first, *_ = made.finish(0)
    assert first.code == 0, first.out
    assert "ValueError: no data here" in first.out


@pytest.mark.slow
def test_a_job_that_has_grown_knows_its_hosts_and_ranks(tmp_path: Path) -> None:
    """Ctrl-Z stopped the first host of a job that had begun alone, and at the end rank 1 of 1 had failed."""
    with cluster(tmp_path, 1, nnodes="1:2", spare=1, options=("--rdzv-conf", "last_call_timeout=0")) as made:
        made.start(1, 1)
        made.first.wait_generation(1, 2)
        made.first.running.process.send_signal(signal.SIGTSTP)
        made.wait_for(0, "a job on several hosts cannot be suspended, and continues")
        made.first.order("raise-1")
        made.first.wait_joined(2, 1)
        made.first.order("raise-1")
        (first, _) = made.ended(0, 1)
    assert first.code == 1
    assert "First failure: rank 1 of 2" in first.out


@pytest.mark.slow
def test_ctrl_c_while_hosts_are_awaited_ends_the_job(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, 1, nnodes="2", env={"WAIT_S": "600"}, options=("--shutdown-timeout", "2")) as made:
        made.kill(1)
        made.wait_for(0, "wait up to 600 s")
        os.kill(made.first.running.process.pid, signal.SIGINT)
        (first,) = made.ended(0)
    assert first.code == 130, first.out


PROGRAM = """
import os, sys, torch
from tests.elastic.jobs import Job, Strike
from tests.elastic.programs import Program, train_program
folder, *lost = sys.argv[1:]
job = Job(folder, (Strike(3, "updated", 5, host=True),) if lost else (), samples=64)
torch.save(train_program(job, Program()), f"{folder}/end-{os.environ['RANK']}")
"""


def run_program(machines: list[Host], folder: Path, *lost: str) -> list[dict[str, Any]]:
    """Return what each rank holds at the end of a job on two hosts; a third one takes the place of a lost one."""
    folder.mkdir()
    script = write_script(folder, PROGRAM)
    options = ("--no-preload", "--host-timeout", "3")
    made = Cluster(machines, folder, "2", {"PYTHONPATH": str(Path(__file__).parents[2])}, options)
    try:
        made.start(0, 2, script, *lost)
        made.start(1, 2, script, *lost)
        if lost:
            made.wait_for(0, "phalanx run: 2 hosts: ")
            made.start(2, 2, script, *lost)
        ends = made.ended(0, 2 if lost else 1)
    finally:
        made.close()
    assert [end.code for end in ends] == [0, 0], ends[0].out
    assert ("#1 (10.77.0.2), with ranks 2, 3, is lost: " in ends[0].out) == bool(lost), ends[0].out
    assert "the record of rank" not in ends[0].out
    return [torch.load(folder / f"end-{rank}", weights_only=False) for rank in range(4)]


@pytest.mark.slow
def test_a_program_whose_second_host_is_lost_goes_on_with_a_spare_one_and_loses_no_bit(tmp_path: Path) -> None:
    """What its ranks alone knew went with it: the spare host's ranks drew other random numbers, and a warning said so.

    All its processes die at once: the kernel there closes their connections, or one that is left for a moment says so.
    """
    with hosts(3) as machines:
        lost = run_program(machines, tmp_path / "lost", "lost")
        quiet = run_program(machines, tmp_path / "quiet")
    for rank, (mine, theirs) in enumerate(zip(lost, quiet, strict=True)):
        assert not differences(mine, theirs), f"rank {rank}"
