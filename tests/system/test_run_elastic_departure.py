"""A scheduler tells the host that leads an elastic job to leave: another one leads, unless all hosts are told.

Real processes in network namespaces; the ranks are those of `elastic_rank.py`, which speak the protocol.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.system.phalanx_command import Finished
from tests.system.test_run_elastic_first_host import WAITS, address_of, await_standbys, find_leader
from tests.system.test_run_elastic_hosts import Cluster, cluster
from tests.system.test_run_elastic_witness import witnessed

from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

LEFT = 128 + signal.SIGTERM


def tell_to_leave(made: Cluster, *numbers: int) -> None:
    for number in numbers:
        made.jobs[number].running.process.terminate()


def require_in_order(left: Finished, *others: Finished) -> None:
    """Nothing was lost: the host has left, and the others have ended well."""
    assert left.code == LEFT, left.out
    assert "this host has left the job, which goes on on the others" in left.out
    assert [end.code for end in others] == [0] * len(others), others[0].out
    for end in (left, *others):
        assert " is lost: " not in end.out
        assert "was lost during the run" not in end.out


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
    assert "with ranks 0, 1, leaves after this step (SIGTERM); 2 ranks on 2 hosts go on" in left.out
    assert "the host that leads the job leaves (SIGTERM). The others choose another one" in ends[0].out
    assert "finished" in ends[0].out
    started = re.findall(r"joined 2 as (\d) of 4", ends[0].out)  # of the others nobody was started again
    assert sorted(started) == sorted(re.findall(r"joined \d+ as (\d) of", ends[0].out)) == ["0", "1"]


@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_first_host_that_is_told_to_leave(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, 1, nnodes="2:3", spare=2, env=WAITS) as made:
        await_standbys(made, 0)
        for number in (3, 4):
            made.start(number, 1)
            made.wait_for(number, "this one waits, to take the place of one that is lost")
        tell_to_leave(made, 0)
        left = made.ended_one(0)
        leader = find_leader(made, 1, 2, 3)  # the first that has come was taken in
        made.wait_for(4, "leads the job now; this host waits there")
        made.jobs[leader].order("finish")
        ends = made.ended(leader, *({1, 2, 3, 4} - {leader}))
    require_in_order(left, *ends)
    assert "3 ranks on 3 hosts go on: rank 0 is started anew" in left.out


@pytest.mark.slow
def test_a_host_that_was_elected_is_told_to_leave_as_well(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, 1, 1, nnodes="1:4", env=WAITS) as made:
        await_standbys(made, 0)
        tell_to_leave(made, 0)
        assert made.ended_one(0).code == LEFT
        second = find_leader(made, 1, 2, 3)
        await_standbys(made, second)
        rest = sorted({1, 2, 3} - {second})
        for number in rest:
            made.wait_for(number, "leads the job now")
            made.jobs[number].lines.clear()
        tell_to_leave(made, second)
        left = made.ended_one(second)
        third = find_leader(made, *rest)
        made.jobs[third].order("finish")
        ends = made.ended(third, *({*rest} - {third}))
    require_in_order(left, *ends)


@pytest.mark.slow
def test_of_two_hosts_and_a_witness_the_first_is_told_to_leave(tmp_path: Path) -> None:
    with witnessed(tmp_path, 1, 2) as (made, _):
        await_standbys(made, 0)
        tell_to_leave(made, 0)
        left = made.ended_one(0)
        made.wait_for(1, "this host leads the job now")
        made.jobs[1].order("finish")
        (end,) = made.ended(1)
    require_in_order(left, end)


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
        made.wait_for(0, "SIGTERM: this host leaves, unless all others are told to end within 2 s, too")
        tell_to_leave(made, 0)
        ends = made.ended(0, 1, 2)
    assert [end.code for end in ends] == [LEFT] * 3, ends[0].out
    assert "SIGTERM: stopping 3 ranks" in ends[0].out


@pytest.mark.slow
def test_the_first_host_and_another_one_are_told_to_leave_at_once_and_the_rest_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, 1, 1, nnodes="1:4", env=WAITS) as made:
        await_standbys(made, 0)
        tell_to_leave(made, 0, 2)
        left = [made.ended_one(0), made.ended_one(2)]
        leader = find_leader(made, 1, 3)
        made.jobs[leader].order("finish")
        ends = made.ended(leader, 4 - leader)
    require_in_order(left[0], *ends)
    assert left[1].code == LEFT, left[1].out


def test_without_enough_hosts_to_choose_another_one_a_sigterm_at_the_first_ends_the_job(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, nnodes="1:2", env=WAITS) as made:
        tell_to_leave(made, 0)
        ends = made.ended(0, 1)
    assert [end.code for end in ends] == [LEFT] * 2, ends[0].out
    assert "SIGTERM: stopping 2 ranks" in ends[0].out
