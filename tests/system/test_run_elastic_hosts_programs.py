"""Programs drawn at random lose ranks on two hosts, and hold what an undisturbed run holds there: everything.

By hand, more: --host-programs 100 --first-program 0.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.elastic.jobs import Job, Strike
from tests.elastic.programs import Program, differences
from tests.elastic.test_generated_programs import draw_program, draw_strikes
from tests.system.test_run_elastic_hosts import Cluster

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("elastic_program.py"))
SIZES = (2, 2)


def run_on_hosts(machines: list[Host], folder: Path, job: Job, program: Program) -> list[dict[str, Any]]:
    """Return what each rank holds at the end, of a job on all hosts."""
    folder.mkdir()
    job = dataclasses.replace(job, folder=str(folder))
    (folder / "program").write_bytes(pickle.dumps((job, program)))
    made = Cluster(machines, folder, "2", {"PYTHONPATH": str(ROOT)})
    try:
        for number, size in enumerate(SIZES):
            made.start(number, size, SCRIPT)
        ends = made.ended(*range(len(SIZES)))
        assert [end.code for end in ends] == [0] * len(SIZES), ends[0].out
        assert "nothing is left of rank" not in ends[0].out
    finally:
        made.close()
    return [torch.load(folder / f"end-{rank}", weights_only=False) for rank in range(sum(SIZES))]


def draw_loss(draw: random.Random, program: Program) -> tuple[Strike, ...]:
    """Draw one loss, or two of which each leaves another rank of its host."""
    strikes = draw_strikes(draw, program, 2)
    host = draw.randrange(2)
    return tuple(dataclasses.replace(one, rank=2 * host + one.rank) for one in strikes)


def test_a_program_on_two_hosts_loses_ranks_and_no_bit(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """What a rank alone knew (buffers, values, random states) went with it, and its replacement had another's."""
    first = pytestconfig.getoption("--first-program")
    with hosts(2) as machines:
        for seed in range(first, first + pytestconfig.getoption("--host-programs")):
            draw = random.Random(seed)
            while (program := draw_program(draw)).optimizer == "zero":  # which is refused on several hosts
                pass
            job = Job("", draw_loss(draw, program), samples=64)
            lost = run_on_hosts(machines, tmp_path / f"lost-{seed}", job, program)
            quiet = run_on_hosts(machines, tmp_path / f"quiet-{seed}", dataclasses.replace(job, strikes=()), program)
            for rank, (mine, theirs) in enumerate(zip(lost, quiet, strict=True)):
                different = differences(mine, theirs)
                assert not different, f"seed {seed}, rank {rank}: {program}, {job.strikes}: {different}"
