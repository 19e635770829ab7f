"""Under `phalanx run`, inside `phalanx.elastic.run`: who is left keeps what it has done, and a replacement helps."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.elastic.small_agent import SmallAgent

import phalanx
from phalanx.mapreduce import map_reduce
from phalanx.mapreduce.attempt import Held
from phalanx.mapreduce.map_reduce import Call, begin_call, drop, keep, take
from phalanx.mapreduce.map_reduce_job import MapReduceJob
from phalanx.mapreduce.splits import Records

SCRIPT = Path(__file__).with_name("elastic_count.py")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher forks replacements on Linux")
def test_a_call_that_a_loss_has_ended_is_made_again_with_what_was_done(tmp_path):
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "rank 1 (pid" in done.stdout
    assert "A replacement is started" in done.stdout
    (kept,) = re.findall(r"rank 0 had kept (\d+) of 10 tasks", done.stdout)
    assert int(kept) >= 1
    assert "rank 1 had kept 0 of 10 tasks" in done.stdout


def job(function, inputs=(1, 2)):
    nothing = dict.fromkeys(("combine", "output", "split_bytes", "split_records", "max_bad_records", "spill_folder"))
    return MapReduceJob(
        inputs=inputs, map=function, reduce=max, partitions=2, gather=False, memory_bytes=1 << 20, encoding="utf-8",
        max_attempts=3, **nothing,
    )  # fmt: skip


def multiply_by(factor):
    return lambda number: [(0, number * factor)]


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    drop()


def test_what_was_done_is_found_by_the_same_call_alone():
    """A loop that calls with another value in a closure each time must not find the result of another turn."""
    interrupted = job(multiply_by(2))
    for other in (job(multiply_by(5)), job(multiply_by(2), inputs=(1, 2, 3)), None):
        held = Held(interrupted)
        keep(Call((0, 3)), interrupted, held)
        assert take(Call((0, 2)), job(multiply_by(2))) is None
        found = take(Call((0, 3)), other or job(multiply_by(2)))
        assert found is (held if other is None else None)
        assert take(Call((0, 3)), job(multiply_by(2))) is None  # once


def test_what_was_done_with_other_records_or_in_another_epoch_is_not_found():
    """A call of each epoch was interrupted in epoch 2, and that of epoch 4, as long, and of the same number since the
    ranks had met, took its outputs: "epoch 4: values of epochs 2 and 4"."""
    interrupted = job(multiply_by(2), inputs=Records([1, 2]))
    keep(Call((2, 1)), interrupted, Held(interrupted))
    assert take(Call((2, 1)), job(multiply_by(2), inputs=Records([1, 3]))) is None
    keep(Call((2, 1)), interrupted, Held(interrupted))
    assert take(Call((4, 1)), interrupted) is None
    assert take(Call((2, 1)), interrupted) is None  # nobody comes for it any more


def test_what_was_done_with_a_file_that_was_written_since_is_not_found(tmp_path):
    """Epochs that write their records under one path found what was done with an earlier one's."""
    path = tmp_path / "records"
    path.write_text("1\n2\n")
    interrupted = job(multiply_by(2), inputs=str(path))
    kept = held = Held(interrupted)
    keep(begin_call(-7, 2, interrupted), interrupted, held)
    assert take(begin_call(-6, 2, interrupted), interrupted) is kept
    keep(begin_call(-5, 2, interrupted), interrupted, held)
    path.write_text("3\n4\n")
    assert take(begin_call(-4, 2, interrupted), interrupted) is None


def test_calls_are_counted_from_the_latest_meeting_or_commit_on():
    numbers = [begin_call(*since, job(max)).place for since in ((-5, 0), (-5, 0), (-4, 0), (-4, 0), (-4, 1))]
    assert numbers == [(0, 1), (0, 2), (0, 1), (0, 2), (1, 1)]


def remember(number, folder):
    """Rank 1 is killed in epoch 2, when rank 0 has done tasks of it."""
    rank, epoch = dist.get_rank(), number // 100
    begun, done = folder / "rank 1 has begun", folder / "rank 0 has done a task"
    if epoch == 2 and "PHALANX_GENERATION" not in os.environ:
        if rank == 1:
            begun.touch()
            while not done.exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        while not begun.exists():
            time.sleep(0.001)
        if number % 100 >= 20:
            done.touch()
    return [(epoch, number % 100)]


def count_each_epoch(folder):
    with phalanx.init(timeout=60.0):
        state = phalanx.elastic.State(found=[])

        @phalanx.elastic.run(state)
        def train(state):
            for epoch in state.epochs(6):
                numbers = [100 * epoch + number for number in range(40)]
                function = functools.partial(remember, folder=folder)
                result = map_reduce(numbers, function, lambda _, values: sum(values), split_records=4, gather=True)
                state.found.append((dict(result), result.num_kept))

        train(state)
        return state.found


def test_an_epoch_does_not_find_what_an_interrupted_call_of_another_epoch_has_left(tmp_path):
    """Epoch 2 was interrupted, and done again as the first call of its generation. The third, that of epoch 4, is of
    the number, the length and the functions of the interrupted one, and took its outputs."""
    ended = SmallAgent(count_each_epoch, 2, tmp_path, folder=tmp_path).run()
    assert ended.generations == 1
    for found in ended.results:
        assert [result for result, _ in found] == [{epoch: sum(range(40))} for epoch in range(6)]
    kept = [[kept for _, kept in found] for found in ended.results]
    assert kept[0][2] >= 1
    assert [sum(found) - found[2] for found in kept] == [0, 0]
