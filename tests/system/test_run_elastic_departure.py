"""A scheduler tells the host that leads an elastic job to leave: another one leads, unless all hosts are told.

Real processes in network namespaces; the ranks are those of `elastic_rank.py`, which speak the protocol.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.system.elastic_hosts import Cluster, cluster
from tests.system.phalanx_command import Finished
from tests.system.standbys import WAITS, address_of, await_standbys, find_leader

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


def test_without_enough_hosts_to_choose_another_one_a_sigterm_at_the_first_ends_the_job(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, 1, nnodes="1:2", env=WAITS) as made:
        tell_to_leave(made, 0)
        ends = made.ended(0, 1)
    assert [end.code for end in ends] == [LEFT] * 2, ends[0].out
    assert "SIGTERM: stopping 2 ranks" in ends[0].out
