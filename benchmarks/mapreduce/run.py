"""Word count of real text: map_reduce on one rank and on two, multiprocessing.Pool and Ray Data, in turns."""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from words import make_text, split_bytes_of, words

from phalanx.mapreduce import map_reduce
from phalanx.testing import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import (
    add_output_arguments,
    describe_machine,
    format_ratio,
    format_time,
    interleave,
    print_table,
    write_results,
)

HERE = Path(__file__).resolve().parent
MEMORY_MEGABYTES = 200  # of text are enough to fill what is asked for


def add_up(word: str, counts: object) -> int:
    return sum(counts)  # type: ignore[call-overload, no-any-return]


def count_with_phalanx(rank: int, world_size: int, path: str, memory_bytes: int, watch: bool) -> dict[str, float]:
    """Seconds, words, and, where it is watched, the most memory that this rank has held above what it began with."""
    if watch:  # the process group's own memory, and what is imported on first use, are there from here on
        map_reduce(range(100), lambda number: [(number, "x" * 1000)], add_up_lengths, gather=True)
    peak = Peak() if watch else None
    begin = time.perf_counter()
    result = map_reduce(
        path, words, add_up, combine=operator.add, split_bytes=split_bytes_of(path), memory_bytes=memory_bytes
    )
    seconds = time.perf_counter() - begin
    held = 0 if peak is None else peak.stop()
    return {
        "seconds": seconds,
        "words": sum(count for _, count in result),
        "held": held,
        "spilled": sum(spool.spilled_bytes for spool in result._spools),
    }


def add_up_lengths(number: int, values: Iterator[str]) -> int:
    return sum(map(len, values))


class Peak:
    """The largest proportional share of memory of this process (PSS), sampled, above that at the beginning."""

    def __init__(self) -> None:
        self._first = self._most = self._read()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _read(self) -> int:
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
        return 0

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self._most = max(self._most, self._read())

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return max(self._most, self._read()) - self._first


def phalanx_s(path: Path, ranks: int, memory_bytes: int, num_words: list[float]) -> float:
    if ranks == 1:
        told = run_ranks(count_with_phalanx, 1, str(path), memory_bytes, False, timeout=3600, init=False)
    else:
        told = run_ranks(count_with_phalanx, ranks, str(path), memory_bytes, False, timeout=3600)
    num_words.append(sum(one["words"] for one in told))
    return max(one["seconds"] for one in told)


def other_s(python: str, contestant: str, path: Path, processes: int, num_words: list[float]) -> float:
    run = subprocess.run(
        [python, str(HERE / "words.py"), contestant, str(path), str(processes)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told = json.loads(run.stdout.splitlines()[-1])
    num_words.append(told["words"])
    return float(told["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory", type=int, default=256, help="MiB that map_reduce may hold, per rank")
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter whose environment has ray[data]")
    parser.add_argument("--only", nargs="*", help="contestants to run")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "phalanx-mapreduce")
    add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    machine = describe_machine()
    path = arguments.folder / f"{arguments.megabytes}.txt"
    make_text(path, arguments.megabytes * 10**6)
    ranks, memory = arguments.ranks, arguments.memory << 20

    num_words: list[float] = []
    contestants = {
        "map_reduce, 1 rank": partial(phalanx_s, path, 1, memory, num_words),
        f"map_reduce, {ranks} ranks": partial(phalanx_s, path, ranks, memory, num_words),
        f"multiprocessing.Pool({ranks})": partial(other_s, sys.executable, "pool", path, ranks, num_words),
    }
    if arguments.ray:
        contestants[f"Ray Data, {ranks} cores"] = partial(other_s, arguments.ray, "ray", path, ranks, num_words)
    if arguments.only:
        contestants = {name: run for name, run in contestants.items() if any(word in name for word in arguments.only)}
    seconds = interleave(contestants, arguments.rounds)
    assert len(set(num_words)) == 1, f"the contestants do not agree: {num_words}"
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ours = medians.get(f"map_reduce, {ranks} ranks")
    rows = [
        [
            name,
            format_time(value),
            f"{arguments.megabytes / value:.1f} MB/s",
            "" if ours is None else format_ratio(value / ours),
        ]
        for name, value in medians.items()
    ]
    print_table([f"word count of {arguments.megabytes:,} MB", "time", "rate", f"of {ranks} ranks'"], rows)

    held = {}
    rows = []
    sample = min(arguments.megabytes, MEMORY_MEGABYTES)
    path = arguments.folder / f"{sample}.txt"
    make_text(path, sample * 10**6)
    for limit in (16, 64, arguments.memory):
        told = run_ranks(count_with_phalanx, ranks, str(path), limit << 20, True, timeout=3600)
        held[limit] = max(one["held"] for one in told)
        rows.append(
            [f"{limit} MiB", f"{held[limit] / 2**20:.0f} MiB", format_time(max(one["seconds"] for one in told))]
        )
    print_table([f"memory_bytes, for {sample:,} MB", "most held (PSS)", "time"], rows)

    results = {
        "megabytes": arguments.megabytes,
        "rounds": arguments.rounds,
        "ranks": ranks,
        "seconds": seconds,
        "held": held,
    }
    write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
