"""A host is lost, or leaves in order, and a spare takes its place: every rank holds the bits of an undisturbed run."""

from __future__ import annotations

import dataclasses
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.elastic.jobs import Job, Strike
from tests.elastic.programs import Program, differences
from tests.system.elastic_hosts import Cluster

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("elastic_program.py"))
SIZES = (2, 2)
PROGRAM = Program(
    layers=("norm", "growing", "generator"), does=("own value",)
)  # with dropout: all that a rank alone knows


def run_on_hosts(machines: list[Host], folder: Path, job: Job, program: Program) -> list[dict[str, Any]]:
    """Return what each rank holds at the end, of a job on two hosts; a third one takes the second one's place."""
    folder.mkdir()
    job = dataclasses.replace(job, folder=str(folder))
    (folder / "program").write_bytes(pickle.dumps((job, program)))
    made = Cluster(machines, folder, "2", {"PYTHONPATH": str(ROOT)}, ("--no-preload", "--host-timeout", "3"))
    is_lost, leaves = (any(getattr(strike, kind) for strike in job.strikes) for kind in ("host", "leaves"))
    try:
        for number, size in enumerate(SIZES):
            made.start(number, size, SCRIPT)
        if is_lost or leaves:
            made.wait_for(0, "phalanx run: 2 hosts: ")
            made.start(2, SIZES[1], SCRIPT)
        if leaves:
            left = made.ended_one(1)
            assert left.code == 128 + signal.SIGTERM, left.out
            assert "the ranks of this host finish their step and end; the others go on" in left.out
        ends = made.ended(0, 2 if is_lost or leaves else 1)
        assert [end.code for end in ends] == [0] * len(SIZES), ends[0].out
        assert ("vm#1 (10.77.0.2), with ranks 2, 3, is lost: " in ends[0].out) == is_lost, ends[0].out
        assert ("with ranks 2, 3, leaves after this step (SIGTERM)" in ends[0].out) == leaves, ends[0].out
        assert not leaves or "is lost" not in ends[0].out
        assert "nothing is left of rank" not in ends[0].out
    finally:
        made.close()
    return [torch.load(folder / f"end-{rank}", weights_only=False) for rank in range(sum(SIZES))]


def require_same(machines: list[Host], folder: Path, job: Job, program: Program) -> None:
    """Run the program with what befalls it and without, and compare all that each rank holds."""
    lost = run_on_hosts(machines, folder / "lost", job, program)
    quiet = run_on_hosts(machines, folder / "quiet", dataclasses.replace(job, strikes=()), program)
    for rank, (mine, theirs) in enumerate(zip(lost, quiet, strict=True)):
        different = differences(mine, theirs)
        assert not different, f"rank {rank}: {different}"


@pytest.mark.slow
def test_a_program_whose_second_host_is_lost_goes_on_with_a_spare_one_and_loses_no_bit(tmp_path: Path) -> None:
    """What its ranks alone knew went with it: the spare host's ranks drew other random numbers, and a warning said so.

    All its processes die at once: the kernel there closes their connections, or one that is left for a moment says so.
    """
    with hosts(3) as machines:
        require_same(machines, tmp_path, Job("", (Strike(3, "updated", 5, host=True),), samples=64), PROGRAM)


@pytest.mark.slow
def test_a_host_that_is_told_to_leave_finishes_its_step_and_a_spare_one_goes_on_with_no_bit_lost(
    tmp_path: Path,
) -> None:
    """A SIGTERM at any host, as before a preemption, ended the job on all of them."""
    with hosts(3) as machines:
        require_same(machines, tmp_path, Job("", (Strike(3, "forward", 3, leaves=True),), samples=64), PROGRAM)
