"""Programs drawn at random lose whole hosts at random moments, and hold what an undisturbed run holds: everything.

What the ranks of a lost host alone knew (what they had drawn, their buffers, their own values) went with it. Two hosts
are lost at once, or one while the others recover from the loss of another. By hand, more:

    pytest tests/elastic/test_lost_hosts.py --lost-host-programs 200 --first-program 0 --timeout 7200
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
from tests.elastic.jobs import Job, Strike
from tests.elastic.programs import Program, train_program
from tests.elastic.small_agent import Ended, SmallAgent
from tests.elastic.test_generated_programs import _POINTS, compare_with_quiet, draw_program, draw_strikes

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

_SHARES = 2
_SIZES = ((1, 1), (2, 2), (1, 1, 1), (2, 1, 2), (1, 1, 1, 1, 1))
_SPARE = 2


def first_of(sizes: tuple[int, ...], host: int) -> int:
    """Return the first rank of a host."""
    return sum(sizes[:host])


def draw_losses(draw: random.Random, program: Program, sizes: tuple[int, ...]) -> tuple[Strike, ...]:
    """Draw the loss of a host; or of two at once, or of one and then another, or a rank's besides."""
    at = dataclasses.replace(draw_strikes(draw, program, 2)[0], host=True)
    first, second, *_ = draw.sample(range(len(sizes)), len(sizes))
    lost = dataclasses.replace(at, rank=first_of(sizes, first))
    kind = draw.choice(("one", "two", "together", "recovering", "rank"))
    other = first_of(sizes, second if len(sizes) > 2 else first)  # of two hosts both would be all who hold the state
    if kind == "two":
        return lost, dataclasses.replace(draw_strikes(draw, program, 2)[0], rank=other, host=True)
    if kind == "together" and len(sizes) > 2:
        return lost, dataclasses.replace(lost, rank=other)
    if kind == "recovering" and len(sizes) > 2:
        return lost, Strike(other, draw.choice(_POINTS), -1, host=True)
    if kind == "rank" and len(sizes) > 2:
        return lost, dataclasses.replace(lost, rank=other, host=False)
    return (lost,)


def run_one(job: Job, program: Program, machines: list[Host], sizes: tuple[int, ...]) -> Ended:
    """Run the program on hosts with what befalls it."""
    folder = Path(job.folder)
    folder.mkdir(parents=True)
    return SmallAgent(
        train_program, sum(sizes), job, program, folder=folder, machines=machines, sizes=sizes, timeout_s=240.0
    ).run()


def run_drawn(seed: int, folder: Path) -> None:
    """Run the program of `seed`, disturbed and not, and compare all that each rank holds."""
    draw = random.Random(seed)
    while (program := draw_program(draw)).optimizer == "zero":  # which is refused on several hosts
        pass
    sizes = draw.choice(_SIZES)
    job = Job(str(folder / "lost"), draw_losses(draw, program, sizes), samples=16 * sum(sizes))
    with hosts(len(sizes) + _SPARE) as machines:
        compare_with_quiet(job, lambda one: run_one(one, program, machines, sizes), f"seed {seed}: {sizes}, {program}")


@pytest.mark.slow
@pytest.mark.parametrize("share", range(_SHARES))
def test_a_program_loses_hosts_and_no_bit(share: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    first = pytestconfig.getoption("--first-program")
    for seed in range(first + share, first + pytestconfig.getoption("--lost-host-programs"), _SHARES):
        run_drawn(seed, tmp_path / str(seed))
