"""Run a map-reduce job over the ranks of a process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from phalanx._base.log import get_logger
from phalanx.errors import PeerLostError
from phalanx.mapreduce.attempt import MapReduceResult, RankOutputs, attempt
from phalanx.mapreduce.map_reduce_job import MapReduceJob
from phalanx.mapreduce.part_files import path_of
from phalanx.mapreduce.result import Result, blocks_of, gather_blocks
from phalanx.mapreduce.splits import Indexable
from phalanx.mapreduce.spool import Spool
from phalanx.mapreduce.team import Team

_logger = get_logger(__name__)
_Path = str | os.PathLike[str]


def map_reduce(
    inputs: _Path | Sequence[_Path] | Indexable[Any],
    map: Callable[[Any], Any],
    reduce: Callable[[Any, Iterator[Any]], Any],
    *,
    combine: Callable[[Any, Any], Any] | None = None,
    partitions: int = 32,
    gather: bool = False,
    output: _Path | None = None,
    memory_bytes: int = 256 << 20,
    split_bytes: int | None = None,
    split_records: int | None = None,
    encoding: str | None = "utf-8",
    max_bad_records: int | None = 0,
    max_attempts: int = 3,
    spill_folder: _Path | None = None,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """Map records to (key, value) pairs, group them by key, and reduce each group, on all ranks of a process group.

        counts = map_reduce(
            "text/*.txt",
            map=lambda line: [(word, 1) for word in line.split()],
            combine=operator.add,
            reduce=lambda word, counts: sum(counts),
        )
        for word, count in counts: ...

    All ranks of the group call it; without a group, one process does all the work. The result is bitwise identical
    with any number of ranks: it depends on the inputs, the functions, the splits, and `memory_bytes`, which decides
    when a table is spilled and so how `combine` groups values.

    Arguments:
        inputs: a file, a pattern, or a list of these (a record is a line); or a sequence (a record is an item; if the
            records are strings or paths, use `Records([...])`). Every rank must be able to read all inputs. `.gz`,
            `.bz2` and `.xz` are decompressed, each file by one task.
        map: takes a record; yields or returns pairs. A record for which it raises is bad, and has no effect.
        reduce: takes a key and an iterator over its values, in the order of the input; returns a value.
        combine: takes two values of a key; must be associative. It combines values within a map task, to send less.
            `reduce` then receives one or several values per task that has the key. `operator.add` on integers needs
            no function call, and `reduce` receives one sum.
        partitions: the number of parts into which a hash divides the keys, the same in every process.
        gather: every rank receives the result of all partitions, instead of only the partitions that it has reduced.
        output: a folder for the result: one file of JSON lines per partition, written by the rank that reduced it.
        memory_bytes: the maximum of data that a rank keeps in memory; it spills the rest to `spill_folder` (default:
            TMPDIR).
        split_bytes, split_records: the size of a map task. Default: 1/32 of the input, but 1 to 32 MiB, or at most
            1000 records.
        encoding: the encoding of the lines; with None, records are bytes. A line that cannot be decoded is bad. An
            encoding whose lines cannot be decoded one by one is refused: UTF-16, UTF-32, EBCDIC, UTF-7.
        max_bad_records: the job fails if more records are bad (by default: if any is). With None, any number may be
            bad, but not all.
        max_attempts: the job fails when a task has failed this many times, on all ranks together, for example because
            ranks cannot read a file.
        group: the process group. Default: the default group.

    If a rank is lost, the call fails on the others. Inside `phalanx.elastic.run`, under `phalanx run`, the rank is
    replaced and the call starts again.

    Raises:
        TypeError, ValueError: an argument is invalid; or, on every rank, a key has an unsupported type, or keys cannot
            be sorted.
        FileNotFoundError: an input does not exist.
        TaskError: a function failed, too many records were bad, or a task failed too often. Every rank raises it.
        PeerLostError, DeadlineError: a rank was lost.
    """
    job = MapReduceJob(
        inputs=inputs,
        map=map,
        reduce=reduce,
        combine=combine,
        partitions=partitions,
        gather=gather,
        output=None if output is None else os.fspath(output),
        memory_bytes=memory_bytes,
        split_bytes=split_bytes,
        split_records=split_records,
        encoding=encoding,
        max_bad_records=max_bad_records,
        max_attempts=max_attempts,
        spill_folder=None if spill_folder is None else os.fspath(spill_folder),
    )
    team = Team.of(group)
    local = RankOutputs(job)
    try:
        outcome = attempt(team, job, local)
        result = _finish(team, job, local, outcome)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise _store_lost(team, error) from error
    finally:
        local.buckets.close()
    if result.counters.num_bad_records and team.rank == 0:
        _logger.warning("map_reduce: %s", result.counters.describe_bad())
    return result


def _store_lost(team: Team, error: Exception) -> PeerLostError:
    first = str(error).splitlines()[0]
    return PeerLostError(
        f"map_reduce on rank {team.rank}: the store of the group has closed, probably with its host rank, so the "
        f"remaining tasks are unknown: {first}",
        ranks=team.find_ended(),
    )


def _finish(team: Team, job: MapReduceJob, local: RankOutputs, outcome: MapReduceResult) -> Result:
    """Return the result with this rank's partitions or, if `job` gathers, with all. All ranks call it."""
    inbox = Spool(job.memory_bytes // 8, job.spill_folder)
    blocks = (
        gather_blocks(team, local.results, local.reduced, inbox, job.memory_bytes)
        if job.gather
        else blocks_of(local.results, local.reduced)
    )
    result = Result(
        blocks,
        (local.reduced, inbox),
        outcome.counters,
        num_tasks=outcome.num_tasks,
        num_retries=local.num_retries,
        num_backups=local.num_backups,
        group=team.group,
    )
    if job.output is not None:
        result.files = tuple(path_of(job.output, number, job.partitions) for number in sorted(local.results))
    return result
