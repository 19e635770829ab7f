"""An elastic job of two hosts goes on without either of them, where a witness has a vote: real processes.

The hosts are network namespaces, and the witness is on a third one: a `phalanx coordinator` or an etcd.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.elastic_hosts import Cluster
from tests.system.phalanx_command import Running, start
from tests.system.standbys import WAITS, await_standbys, find_leader

from phalanx._comm.control.key import Key
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


_KEY = Key(bytes(32))


_PORT = 29481


def start_coordinator(machine: Host) -> contextlib.AbstractContextManager[Running]:
    """The command that keeps the vote."""
    line = ("coordinator", "--bind", f"{machine.address}:{_PORT}")
    return start(*line, env={"PHALANX_KEY": str(_KEY)}, before=machine.command, stderr=subprocess.STDOUT)


def make_cluster(machines: list[Host], folder: Path, scheme: str = "") -> Cluster:
    """A cluster whose last machine is the witness's."""
    options = ("--no-preload", "--host-timeout", "3", "--witness", f"{scheme}{machines[-1].address}:{_PORT}")
    return Cluster(machines, folder, f"1:{len(machines) - 1}", WAITS, options)


@contextlib.contextmanager
def witnessed(folder: Path, *sizes: int, late: bool = False) -> Iterator[tuple[Cluster, Running]]:
    """Hosts with so many ranks each, and a witness on one more; `late`: it is started once the ranks run."""
    with hosts(len(sizes) + 1) as machines, contextlib.ExitStack() as stack:
        witness = machines[-1]
        made = make_cluster(machines, folder)
        stack.callback(made.close)
        if not late:
            running = stack.enter_context(start_coordinator(witness))
            running.read_until("coordinator: listening")
        for number, size in enumerate(sizes):
            made.start(number, size)
            if number:
                made.wait_connected(number)
        made.first.wait_joined(0, *range(sum(sizes)))
        if late:
            made.wait_for(0, "does not vote")
            running = stack.enter_context(start_coordinator(witness))
            made.wait_for(0, f"the witness at {witness.address}:{_PORT} votes")
        yield made, running


def list_keys(made: Cluster) -> list[str]:
    """Return the keys that the witness keeps, asked from its own host."""
    script = (
        "import sys; from phalanx._comm.control.client import Client; from phalanx._comm.control.key import Key; "
        "print(*Client(sys.argv[1], Key(bytes(32))).list_keys('phalanx/witness/'))"
    )
    address = f"{made.machines[-1].address}:{_PORT}"
    line = [*made.machines[-1].command, sys.executable, "-c", script, address]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=600).stdout.split()


@pytest.mark.slow(but=("False",))
@pytest.mark.parametrize("late", [False, True])
def test_of_two_hosts_the_second_goes_on_without_the_first(tmp_path: Path, late: bool) -> None:
    with witnessed(tmp_path, 1, 2, late=late) as (made, _):
        await_standbys(made, 0)
        assert len(list_keys(made)) == 1
        made.kill(0)
        made.wait_for(1, "this host leads the job now")
        made.jobs[1].wait_generation(1, 2)
        made.jobs[1].order("finish")
        (end,) = made.ended(1)
        assert list_keys(made) == []  # the job is over
    assert end.code == 0, end.out
    assert "1 rank was lost during the run" in end.out


@pytest.mark.slow
def test_of_two_hosts_the_first_goes_on_without_the_second_and_takes_it_in_again(tmp_path: Path) -> None:
    with witnessed(tmp_path, 1, 1) as (made, _):
        await_standbys(made, 0)
        made.kill(1)
        made.first.wait_generation(1, 1)
        made.start(1, 1)
        made.first.wait_generation(2, 2)
        made.kill(0)
        made.wait_for(1, "this host leads the job now")
        made.jobs[1].wait_generation(3, 1)
        made.jobs[1].order("finish")
        (end,) = made.ended(1)
    assert end.code == 0, end.out


@pytest.mark.slow
def test_a_first_host_that_is_cut_off_is_out_though_the_others_are_one_host_and_a_witness(tmp_path: Path) -> None:
    with witnessed(tmp_path, 1, 1) as (made, _):
        await_standbys(made, 0)
        made.machines[0].cut_off()
        made.wait_for(1, "this host leads the job now")
        made.jobs[1].wait_generation(1, 1)
        made.machines[0].plug_in()
        first = made.ended_one(0)
        made.jobs[1].order("finish")
        (end,) = made.ended(1)
    assert first.code == 1
    assert (
        "it reaches 1 of the 2 hosts that were in the job together, and not the witness (2 of these are needed)"
        in first.out
    )
    assert "generation 1" not in first.out
    assert end.code == 0, end.out


@pytest.mark.slow
def test_a_second_host_that_is_cut_off_does_not_lead_and_is_taken_in_again(tmp_path: Path) -> None:
    """It and the first host would both have gone on, each as one of two."""
    with witnessed(tmp_path, 1, 1) as (made, _):
        await_standbys(made, 0)
        made.machines[1].cut_off()
        made.first.wait_generation(1, 1)
        made.wait_for(1, "for the first host, to rejoin the job")
        made.machines[1].plug_in()
        made.first.wait_generation(2, 2)
        ends = made.finish(0, 1)
    assert [end.code for end in ends] == [0, 0], ends[0].out
    assert "this host leads the job now" not in ends[1].out


@pytest.mark.slow
def test_a_witness_that_was_started_again_has_no_vote(tmp_path: Path) -> None:
    """It would promise the second host what it has promised the first one."""
    with witnessed(tmp_path, 1, 1) as (made, running):
        await_standbys(made, 0)
        running.process.terminate()
        running.finish()
        with start_coordinator(made.machines[-1]) as again:
            again.read_until("coordinator: listening")
            made.kill(0)
            end = made.ended_one(1)
        made.jobs.pop(0)
    assert end.code not in (0, None)
    assert "this host leads the job now" not in end.out


@pytest.mark.slow
def test_three_hosts_and_a_witness_lose_the_first_and_then_another_one(tmp_path: Path) -> None:
    with witnessed(tmp_path, 1, 1, 1) as (made, _):
        await_standbys(made, 0)
        made.kill(0)
        second = find_leader(made, 1, 2)
        made.jobs[second].wait_generation(1, 2)
        await_standbys(made, second)
        made.kill(second)
        third = 3 - second
        made.wait_for(third, "this host leads the job now")
        made.jobs[third].wait_generation(2, 1)
        made.jobs[third].order("finish")
        (end,) = made.ended(third)
    assert end.code == 0, end.out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd here (Debian: etcd-server)")
def test_an_etcd_is_a_witness(tmp_path: Path) -> None:
    with hosts(3) as machines, contextlib.ExitStack() as stack:
        url, peer_url = f"http://{machines[2].address}:{_PORT}", "http://127.0.0.1:29482"
        words = ("--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer_url,
                 "--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"default={peer_url}")  # fmt: skip
        log = stack.enter_context(open(tmp_path / "etcd.log", "wb"))
        line = [*machines[2].command, "etcd", "--data-dir", str(tmp_path / "etcd"), *words]
        etcd = stack.enter_context(subprocess.Popen(line, stdout=log, stderr=log))
        stack.callback(etcd.terminate)
        made = make_cluster(machines, tmp_path, "etcd://")
        stack.callback(made.close)
        made.start(0, 1)
        made.start(1, 1)
        made.first.wait_joined(0, 1)
        await_standbys(made, 0)
        made.kill(0)
        made.wait_for(1, "this host leads the job now")
        made.jobs[1].wait_generation(1, 1)
        made.jobs[1].order("finish")
        (end,) = made.ended(1)
        assert etcd.poll() is None, (tmp_path / "etcd.log").read_text()
    assert end.code == 0, end.out
