"""A job of two ranks for test_elastic.py: rank 1 is killed when rank 0 has done a task and has begun another."""

import os
import signal
import sys
import time
from pathlib import Path

import phalanx
from phalanx.mapreduce import map_reduce

done_one, has_begun = (Path(sys.argv[1]) / name for name in ("rank 0 has done a task", "rank 1 has begun one"))
job = phalanx.init()
begun = set()


def wait_for(place):
    while not place.exists():
        time.sleep(0.001)


def remainder(number):
    begun.add(number // 10)
    if job.rank == 0 and len(begun) == 2:
        done_one.touch()
        wait_for(has_begun)  # or it would do all of them before the other comes
    elif job.rank == 1 and "PHALANX_GENERATION" not in os.environ:
        has_begun.touch()
        wait_for(done_one)
        os.kill(os.getpid(), signal.SIGKILL)
    yield number % 7, number


@phalanx.elastic.run(phalanx.elastic.State(job=0))
def count(state):
    return map_reduce(range(100), remainder, lambda key, values: list(values), split_records=10, gather=True)


result = count()
assert dict(result) == {key: list(range(key, 100, 7)) for key in range(7)}
print(f"rank {job.rank} has all {len(dict(result))} keys")
