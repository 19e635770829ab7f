"""Under `phalanx run`, inside `phalanx.elastic.run`: who is left keeps what it has done, and a replacement helps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.mapreduce.attempt import Held
from phalanx.mapreduce.interrupted import count_call, keep, take
from phalanx.mapreduce.job import Job

SCRIPT = Path(__file__).with_name("elastic_count.py")


@pytest.mark.skipif(sys.platform != "linux", reason="the launcher forks replacements on Linux")
def test_a_call_that_a_loss_has_ended_is_made_again_with_what_was_done(tmp_path):
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110)
    assert done.returncode == 0, done.stdout
    assert "rank 1 (pid" in done.stdout
    assert "A replacement is started" in done.stdout
    (kept,) = re.findall(r"rank 0 had kept (\d+) of 10 tasks", done.stdout)
    assert int(kept) >= 1
    assert "rank 1 had kept 0 of 10 tasks" in done.stdout


def job(function, inputs=(1, 2)):
    nothing = dict.fromkeys(("combine", "output", "split_bytes", "split_records", "max_bad_records", "spill_folder"))
    return Job(
        inputs=inputs, map=function, reduce=max, partitions=2, gather=False, memory_bytes=1 << 20, encoding="utf-8",
        max_attempts=3, **nothing,
    )  # fmt: skip


def multiply_by(factor):
    return lambda number: [(0, number * factor)]


def test_what_was_done_is_found_by_the_same_call_alone():
    """A loop that calls with another value in a closure each time must not find the result of another turn."""
    interrupted = job(multiply_by(2))
    held = Held(interrupted)
    keep(3, interrupted, held)
    assert take(2, job(multiply_by(2))) is None
    assert take(3, job(multiply_by(5))) is None
    assert take(3, job(multiply_by(2), inputs=(1, 2, 3))) is None
    assert take(3, job(multiply_by(2))) is held
    assert take(3, job(multiply_by(2))) is None  # once


def test_calls_are_counted_from_the_latest_meeting_on():
    assert [count_call(-5), count_call(-5), count_call(-4), count_call(-4)] == [1, 2, 1, 2]
