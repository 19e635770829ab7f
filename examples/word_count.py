"""Count the words of Python's own sources and licences; kill a rank while it runs, and the count stays what it is.

    phalanx run --nproc-per-node 2 examples/word_count.py
    phalanx run --nproc-per-node 2 examples/word_count.py --files 'texts/*.txt' --output counts

Also without `phalanx run`, as one process.
"""

import argparse
import heapq
import operator
import os
import sysconfig
from pathlib import Path

import phalanx
from phalanx.mapreduce import map_reduce


def standard_library():
    """Its sources, and the licences that lie beside them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in folder.rglob("*") if path.suffix in (".py", ".txt") and path.is_file()]
    return sorted(path for path in found if "site-packages" not in path.parts)


def words(line):
    for word in line.split():
        yield word, 1


def add_up(word, counts):
    return sum(counts)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--files", nargs="*", help="paths or patterns; the standard library by default")
parser.add_argument("--output", help="a folder for the whole result, as JSON lines")
parser.add_argument("--show", type=int, default=10)
arguments = parser.parse_args()

job = phalanx.init()
print(f"rank {job.rank} is process {os.getpid()}", flush=True)
state = phalanx.elastic.State(job=0)


@phalanx.elastic.run(state)
def count(state):
    return map_reduce(
        arguments.files or standard_library(),
        words,
        add_up,
        combine=operator.add,
        gather=True,
        output=arguments.output,
        max_bad_records=10_000,  # some of the sources are no UTF-8, on purpose
    )


result = count()
if job.rank == 0:
    c = result.counters
    print(f"{c.records:,} lines, {c.num_bad_records:,} bad, {c.pairs:,} words, {sum(1 for _ in result):,} different")
    for word, number in heapq.nlargest(arguments.show, result, key=lambda pair: (pair[1], pair[0])):
        print(f"{number:9,}  {word}")
