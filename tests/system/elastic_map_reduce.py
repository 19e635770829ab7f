"""A rank of an elastic job on several hosts that runs a `map_reduce`: rank 0 stands in a task until its host is lost.

The others do tasks before it does, and wait for FOLDER/go in the next one.
"""

import os
import sys
import time
from pathlib import Path

import phalanx
from phalanx.mapreduce import map_reduce


def main(folder: Path) -> None:
    begun: set[int] = set()
    with phalanx.init(timeout=60.0) as job:

        def remainder(number: int) -> list[tuple[int, int]]:
            begun.add(number // 10)
            if "PHALANX_GENERATION" not in os.environ:
                if job.rank == 0:
                    sys.stdout.write("rank 0 stands\n")
                    sys.stdout.flush()
                    while True:
                        time.sleep(0.01)
                if len(begun) == 3:
                    (folder / f"waits-{job.rank}").touch()
                    while not (folder / "go").exists():
                        time.sleep(0.01)
            return [(number % 7, number)]

        @phalanx.elastic.run(phalanx.elastic.State(job=0), wait_s=600.0)
        def count(state: phalanx.elastic.State) -> phalanx.mapreduce.Result:
            return map_reduce(range(300), remainder, lambda _, values: list(values), split_records=10, gather=True)

        result = count()
        assert dict(result) == {key: list(range(key, 300, 7)) for key in range(7)}
        print(f"rank {job.rank} had kept {result.num_kept} of {result.num_tasks} tasks")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
