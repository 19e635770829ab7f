"""Generated jobs over generated files give what a dict of lists gives: keys of all kinds, odd bytes, little memory."""

import bz2
import gzip
import lzma
import operator
import random
from collections import defaultdict

import pytest

from phalanx.mapreduce import map_reduce
from phalanx.testing import run_ranks

JOBS = 24
COMPRESS = {".txt": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
WORDS = [b"a", b"bb", "ä".encode(), b"\0", b"\r", b"w1", b"w2", b"w3"]


def ones(line):
    return [(word, 1) for word in line.split(" ")]


def places(line):
    return (((len(word), word), (line[:20], 0.1 * len(line))) for word in line.split(" "))


def fractions(line):
    return [(len(word) / 2, 0.1 * len(line)) for word in line.split(" ")]


def some(line):
    """Raises in the midst of a line."""
    for word in line.split(" "):
        yield word, 1 // (len(word) - 2)


def write_files(folder, rng):
    """Files, and their lines as bytes."""
    paths, lines = [], []
    for number in range(rng.randrange(1, 5)):
        data = b""
        for _ in range(rng.randrange(100)):
            line = b" ".join(rng.choices(WORDS, k=rng.randrange(8)))
            if rng.random() < 0.02:
                line = rng.choice([line + b"\xff", (line + b" ") * 3000])
            data += line + rng.choice([b"\n", b"\n", b"\r\n"])
        data = data[: len(data) - rng.randrange(2)]
        suffix = rng.choice([".txt", *COMPRESS])
        paths.append(folder / f"{number}{suffix}")
        paths[-1].write_bytes(COMPRESS[suffix](data))
        *whole, last = data.split(b"\n")
        lines += [line.removesuffix(b"\r") for line in whole] + [last] * (last != b"")
    return paths, lines


def plan(folder, seed):
    """The arguments of a job, and what is in its files."""
    rng = random.Random(seed)
    paths, lines = write_files(folder, rng)
    mapped = rng.choice([ones, places, fractions, some])
    combine = None if mapped is places else rng.choice([None, operator.add, lambda a, b: a + b])
    job = {
        "inputs": paths,
        "map": mapped,
        "reduce": (lambda key, values: list(values)) if combine is None else (lambda key, values: sum(values)),
        "combine": combine,
        "memory_bytes": rng.choice([1 << 20, 1 << 26]),
        "split_bytes": rng.choice([None, 50, 777, 10**5]),
        "partitions": rng.choice([1, 3, 32]),
        "max_bad_records": None,
        "gather": True,
    }
    return job, lines


def by_hand(job, lines):
    want, bad = defaultdict(list), 0
    for line in lines:
        try:
            pairs = list(job["map"](line.decode()))
        except (UnicodeDecodeError, ZeroDivisionError):
            bad += 1
            continue
        for key, value in pairs:
            want[key].append(value)
    return dict(sorted(want.items())), bad


def results(rank, world_size, folder):
    found = []
    for seed in range(JOBS):
        place = folder / f"{rank}-{seed}"  # each has files of its own, which are the same
        place.mkdir()
        result = map_reduce(**plan(place, seed)[0])
        found.append((list(result), result.counters.records, result.counters.num_bad_records))
    return found


@pytest.mark.slow
def test_generated_jobs_give_what_a_dict_gives_on_any_number_of_ranks(tmp_path):
    for world_size in (1, 3):
        (folder := tmp_path / str(world_size)).mkdir()
        ranks = run_ranks(results, world_size, folder, init=world_size > 1)
        for seed in range(JOBS):
            (place := tmp_path / f"{world_size} {seed}").mkdir()
            job, lines = plan(place, seed)
            want, bad = by_hand(job, lines)
            for found in ranks:
                pairs, records, num_bad = found[seed]
                assert (records, num_bad, [key for key, _ in pairs]) == (len(lines), bad, list(want)), seed
                if job["combine"] is None:
                    assert dict(pairs) == want, seed
                else:
                    assert dict(pairs) == pytest.approx({key: sum(values) for key, values in want.items()}), seed
                assert found[seed] == ranks[0][seed]
