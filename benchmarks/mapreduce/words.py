"""The text, and the word count that every contestant does with it. No import but Python's own: Ray's has no torch."""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

MOST_SPLIT_BYTES = 32 << 20


def words(line: str) -> Iterator[tuple[str, int]]:
    """The map function."""
    for word in line.split():
        yield word, 1


def make_text(path: Path, num_bytes: int) -> None:
    """Python's standard library, sources and licences, as often as it takes."""
    if path.exists() and path.stat().st_size == num_bytes:
        return
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in library.rglob("*") if p.suffix in (".py", ".txt") and "site-packages" not in p.parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        while out.tell() < num_bytes:
            for file in files:
                # A few sources are not UTF-8, on purpose; every contestant gets the same text.
                out.write(file.read_bytes().decode("utf-8", "replace").encode()[: num_bytes - out.tell()])
    data = path.read_bytes()[-4:]  # a character that the end cuts in two
    with path.open("r+b") as out:
        out.seek(-4, 2)
        out.write(data.decode("ascii", "replace").replace("\ufffd", " ").encode())


def split_bytes_of(path: str) -> int:
    """How much of the text is one task, for every contestant."""
    return min(MOST_SPLIT_BYTES, Path(path).stat().st_size // 16)


def splits_of(path: str) -> list[tuple[str, int, int]]:
    """Pieces of some MiB, cut at lines."""
    size, span, starts = Path(path).stat().st_size, split_bytes_of(path), [0]
    with open(path, "rb") as file:
        while starts[-1] + span < size:
            file.seek(starts[-1] + span)
            file.readline()
            starts.append(file.tell())
    return [(path, start, stop) for start, stop in zip(starts, [*starts[1:], size], strict=True) if start < stop]


def count_split(split: tuple[str, int, int]) -> dict[str, int]:
    """The words of a piece, counted as map_reduce does it for a task."""
    path, start, stop = split
    counts: dict[str, int] = {}
    with open(path, "rb") as file:
        file.seek(start)
        at = start
        for line in file:
            at += len(line)
            for word, count in words(line.decode()):
                counts[word] = counts.get(word, 0) + count
            if at >= stop:
                break
    return counts


def count_with_pool(path: str, processes: int) -> tuple[float, int]:
    """Seconds, and the number of words; the processes have started before."""
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(processes) as pool:
        pool.map(abs, range(processes))
        begin = time.perf_counter()
        total: dict[str, int] = {}
        for counts in pool.imap(count_split, splits_of(path)):
            for word, count in counts.items():
                total[word] = total.get(word, 0) + count
        result = sorted(total.items())
        return time.perf_counter() - begin, sum(count for _, count in result)


def count_with_ray(path: str, processes: int) -> tuple[float, int]:
    """The same with Ray Data: counted by batch, which is its combine, then summed by word."""
    import logging
    import os
    import sys

    import ray
    import ray.data

    # Its workers find this file, which a pickle names, by the path.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    sys.path.insert(0, str(Path(__file__).parent))
    ray.init(num_cpus=processes, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def count(batch: dict) -> dict:  # type: ignore[type-arg]
        import numpy

        counts = count_split((str(batch["path"][0]), int(batch["start"][0]), int(batch["stop"][0])))
        return {"word": numpy.array(list(counts), dtype=object), "count": numpy.array(list(counts.values()))}

    splits = splits_of(path)
    ray.data.range(processes).materialize()  # its workers start
    begin = time.perf_counter()
    pieces = ray.data.from_items(
        [{"path": p, "start": a, "stop": b} for p, a, b in splits], override_num_blocks=len(splits)
    )
    counted = pieces.map_batches(count, batch_size=1).groupby("word").sum("count").materialize()
    seconds = time.perf_counter() - begin
    return seconds, int(counted.to_pandas()["sum(count)"].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="One contestant, in a process of its own; prints JSON.")
    parser.add_argument("contestant", choices=["pool", "ray"])
    parser.add_argument("path")
    parser.add_argument("processes", type=int)
    arguments = parser.parse_args()
    count = {"pool": count_with_pool, "ray": count_with_ray}[arguments.contestant]
    seconds, total = count(arguments.path, arguments.processes)
    print(json.dumps({"seconds": seconds, "words": total}))


if __name__ == "__main__":
    main()
