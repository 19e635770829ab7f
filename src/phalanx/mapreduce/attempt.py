"""Run the phases of a job on all ranks: plan, map, shuffle, reduce.

agree       compare arguments, share one plan                  gather
map         run the map tasks                                  board
report      gather the sizes of all buckets, and the counters  gather
shuffle     send buckets to the owners of their partitions     all_to_all, in rounds
reduce      reduce the partitions of this rank                 no communication
end         wait until all ranks have finished                 board
"""

from __future__ import annotations

import contextlib
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from phalanx._base.log import get_logger
from phalanx._base.malloc import release_freed_values
from phalanx.errors import DeadlineError, MismatchError, PeerLostError, message_of, summary_of
from phalanx.mapreduce.board import Board
from phalanx.mapreduce.counters import Counters
from phalanx.mapreduce.exchange import exchange
from phalanx.mapreduce.grouper import Grouper, Run, read_blocks, write_blocks
from phalanx.mapreduce.keys import require_order
from phalanx.mapreduce.map_reduce_job import MapReduceJob, TaskError
from phalanx.mapreduce.map_task import MapOutput, rarely_collecting, run_map_task
from phalanx.mapreduce.part_files import make_output_folder, write_part
from phalanx.mapreduce.splits import Split, find_files, plan_file_splits, plan_sequence_splits
from phalanx.mapreduce.spool import Spool, SpoolStream
from phalanx.mapreduce.table import NotPairsError
from phalanx.mapreduce.team import RankProcess, Team

_logger = get_logger(__name__)
_CHECK_EVERY = 64  # keys between two checks of the peers
_RAISED = {"TypeError": TypeError, "ValueError": ValueError, "FileNotFoundError": FileNotFoundError}


@dataclass
class RankOutputs:
    """`RankOutputs` has the map outputs and the reduced partitions of one rank."""

    job: MapReduceJob
    splits: list[Split] = field(default_factory=list)
    outputs: dict[int, MapOutput] = field(default_factory=dict)  # by task
    results: dict[int, Run] = field(default_factory=dict)  # by partition
    num_backups: int = 0
    num_retries: int = 0

    def __post_init__(self) -> None:
        memory, folder = self.job.memory_bytes, self.job.spill_folder
        self.buckets = Spool(memory // 4, folder)
        self.reduced = Spool(memory // 8, folder)


@dataclass(frozen=True)
class TaskReport:
    """A `TaskReport` is a rank's report on a map task. `lengths[run][partition]` is the length of a bucket."""

    lengths: list[list[int]]
    kinds: set[str]
    counters: Counters


@dataclass(frozen=True)
class MapReduceResult:
    """A `MapReduceResult` has the counters of a finished job, and the number of its map tasks."""

    counters: Counters
    num_tasks: int


def agree_on_plan(team: Team, job: MapReduceJob, local: RankOutputs) -> str:
    """Agree with all ranks on the splits of the inputs; return the prefix of this call's keys in the store.

    Raises:
        ValueError: the ranks' arguments differ.
        Any error with which rank 0's plan fails, on every rank.
    """
    me = RankProcess.of_self()
    reports_by_rank = team.gather((me, job.terms))
    team.processes = [process for process, _ in reports_by_rank]
    by_rank = [terms for _, terms in reports_by_rank]
    if differing := [name for name in job.terms if any(terms[name] != by_rank[0][name] for terms in by_rank)]:
        named = "\n".join(
            f"  rank {rank}: " + ", ".join(f"{name}={terms[name]}" for name in differing)
            for rank, terms in enumerate(by_rank)
        )
        raise ValueError(f"map_reduce: the ranks were called with different arguments:\n{named}")
    kind, plan = team.gather(_plan(job) if team.rank == 0 else None)[0]
    if kind:
        raise _RAISED.get(kind, TaskError)(plan)
    prefix, local.splits = plan
    return str(prefix)


def _plan(job: MapReduceJob) -> tuple[str, Any]:
    try:
        if job.output is not None:
            make_output_folder(job.output, job.partitions)
        sequence = job.sequence
        splits = (
            [*plan_file_splits(find_files(job.inputs), job.split_bytes)]
            if sequence is None
            else [*plan_sequence_splits(len(sequence), job.split_records)]
        )
    except Exception as error:
        return type(error).__name__, message_of(error)
    return "", (f"phalanx-mapreduce/{uuid.uuid4()}", splits)


def attempt(team: Team, job: MapReduceJob, local: RankOutputs) -> MapReduceResult:
    """Run the job once. All ranks call this.

    Raises:
        PeerLostError, DeadlineError: a rank was lost.
        TaskError, TypeError, ValueError, FileNotFoundError: the job failed; every rank raises the same error.
    """
    with rarely_collecting():
        return _attempt(team, job, local)


def _attempt(team: Team, job: MapReduceJob, local: RankOutputs) -> MapReduceResult:
    prefix = agree_on_plan(team, job, local)
    splits = local.splits
    board = Board(team, prefix, len(splits))
    with _problem_first(board):
        _map(board, job, local, splits)
        # A rank may detect a problem after others have seen the last task complete: here all ranks learn of it.
        gathered = team.gather((board.problem(), {task: _report(output) for task, output in local.outputs.items()}))
    _raise_problem(team, next((problem for problem, _ in gathered if problem is not None), None), board.cause)
    reports_by_rank = [reports for _, reports in gathered]
    makers = {
        task: next(rank for rank, reports in enumerate(reports_by_rank) if task in reports)
        for task in range(len(splits))
    }
    reports = [reports_by_rank[makers[task]][task] for task in range(len(splits))]
    counters = Counters()
    for report in reports:
        counters.add(report.counters)
    _require_few_bad(job, counters)
    require_order(set().union(*(report.kinds for report in reports)))

    owners = {partition: partition % team.size for partition in range(job.partitions)}
    with_buckets = _shuffle(team, job, local, owners, makers, reports)
    with _problem_first(board):
        try:
            for partition, buckets in with_buckets:
                local.results[partition] = _reduce(job, local, buckets, board)
                if job.output is not None:
                    _write(job.output, local, partition, job.partitions)
        except (PeerLostError, DeadlineError, MismatchError):
            raise
        except (TypeError, TaskError) as error:
            board.fail_job(type(error).__name__, message_of(error), error)
            _raise_problem(team, board.problem(), error)
        except Exception as error:
            board.fail_job("TaskError", f"map_reduce: a partition could not be reduced.\n{_format_error(error)}", error)
            _raise_problem(team, board.problem(), error)
        team.store.set(f"{prefix}/reduced/{team.rank}", "1")
        reduced = [f"{prefix}/reduced/{rank}" for rank in range(team.size)]
        team.wait_until(lambda: team.store.check(reduced) or board.problem() is not None)
    _raise_problem(team, board.problem())
    return MapReduceResult(counters, len(splits))


@contextlib.contextmanager
def _problem_first(board: Board) -> Iterator[None]:
    """If a rank is lost, raise the job's problem instead, if any: the rank may have published it and exited."""
    try:
        yield
    except PeerLostError:
        with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):  # the lost rank may have hosted the store
            _raise_problem(board.team, board.problem())
        raise


def _map(board: Board, job: MapReduceJob, local: RankOutputs, splits: Sequence[Split]) -> None:
    while board.problem() is None and (task := board.claim()) is not None:
        _do_map_task(board, job, local, splits[task], task)
    while board.problem() is None and (task := board.find_idle()) is not None:
        _do_map_task(board, job, local, splits[task], task)
    local.num_backups += board.num_backups


def _do_map_task(board: Board, job: MapReduceJob, local: RankOutputs, split: Split, task: int) -> None:
    try:
        output = run_map_task(split, job, local.buckets, lambda: board.is_open(task))
    except PeerLostError:
        raise
    except NotPairsError as error:
        board.fail_job("TypeError", f"map_reduce: {message_of(error)}", error.__cause__)
        return
    except (TypeError, ValueError) as error:  # raised for a key: an error in the map function only makes the record bad
        board.fail_job(type(error).__name__, message_of(error), error)
        return
    except Exception as error:
        _logger.warning(
            "map_reduce: task %d failed on rank %d: %s: %s", task, board.team.rank, type(error).__name__, error
        )
        local.num_retries += 1
        if board.fail(task, _format_error(error)) >= job.max_attempts:
            failures = "\n".join(f"On rank {rank}: {text}" for rank, text in board.failures(task))
            text = f"map_reduce: task {task} ({split}) failed {job.max_attempts} times.\n{failures}"
            board.fail_job("TaskError", text, error)
        return
    if output is None:
        return
    local.outputs[task] = output
    board.finish(task, output.seconds)
    total = Counters()
    for one in local.outputs.values():
        total.num_bad_records += one.counters.num_bad_records
    if job.max_bad_records is not None and total.num_bad_records > job.max_bad_records:
        board.fail_job("TaskError", _describe_bad(output.counters, total.num_bad_records, job.max_bad_records))


def _require_few_bad(job: MapReduceJob, counters: Counters) -> None:
    bad = counters.num_bad_records
    if bad and (bad == counters.records or (job.max_bad_records is not None and bad > job.max_bad_records)):
        raise TaskError(_describe_bad(counters, bad, job.max_bad_records))


def _describe_bad(counters: Counters, bad: int, allowed: int | None) -> str:
    shown = counters.bad_records[:1]
    why = (
        "all records are bad"
        if allowed is None or bad <= allowed
        else f"{bad:,} {'record is' if bad == 1 else 'records are'} bad, and {allowed:,} are allowed"
    )
    return f"map_reduce: {why} (max_bad_records). The first:\n  " + "\n".join(
        f"{one}\n{one.traceback}" for one in shown
    )


def _format_error(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-4000:]


def _raise_problem(team: Team, problem: tuple[int, str, str] | None, cause: BaseException | None = None) -> None:
    if problem is None:
        return
    rank, kind, text = problem
    where = f"{text}\n(Raised on rank {rank}.)" if team.size > 1 else text
    raise _RAISED.get(kind, TaskError)(where) from (cause if rank == team.rank else None)


def _report(output: MapOutput) -> TaskReport:
    return TaskReport([[extent.length for extent in run] for run in output.runs], output.kinds, output.counters)


def _shuffle(
    team: Team,
    job: MapReduceJob,
    local: RankOutputs,
    owners: Mapping[int, int],
    makers: Mapping[int, int],
    reports: Sequence[TaskReport],
) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield the partitions of this rank, each with its buckets in the order of tasks and runs.

    A rank's buckets for another rank form one stream, ordered by partition, task and run. Both ranks compute the offset
    of each bucket.
    """
    own = {rank: sorted(p for p, owner in owners.items() if owner == rank) for rank in range(team.size)}
    made = {rank: [task for task in sorted(makers) if makers[task] == rank] for rank in range(team.size)}

    def lengths(src: int, dst: int) -> Iterator[tuple[int, int, int]]:
        for partition in own[dst]:
            for task in made[src]:
                for run in reports[task].lengths:
                    yield partition, task, run[partition]

    outgoing = [
        SpoolStream(
            local.buckets,
            [run[p] for p in own[dst] for task in made[team.rank] for run in local.outputs[task].runs],
        )
        for dst in range(team.size)
    ]
    totals = [[sum(length for *_, length in lengths(src, dst)) for dst in range(team.size)] for src in range(team.size)]
    longest = (
        max(totals[src][dst] for src in range(team.size) for dst in range(team.size) if src != dst)
        if team.size > 1
        else 0
    )
    inbox = Spool(job.memory_bytes // 8, job.spill_folder)
    streams = exchange(team, outgoing, [row[team.rank] for row in totals], longest, inbox, job.memory_bytes)
    places: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for src in range(team.size):
        at = 0
        for partition, task, length in lengths(src, team.rank):
            places.setdefault((partition, task), []).append((src, at, length))
            at += length

    def buckets(partition: int) -> Iterator[bytes]:
        for task in range(len(reports)):
            for src, at, length in places.get((partition, task), ()):
                if length:
                    yield streams[src].read(at, length)

    for partition in own[team.rank]:
        yield partition, buckets(partition)
    inbox.close()


def _reduce(job: MapReduceJob, local: RankOutputs, buckets: Iterator[bytes], board: Board) -> Run:
    runs = Spool(0, job.spill_folder)
    begin = local.reduced.size
    num_bytes = num_keys = 0
    try:
        grouper = Grouper(runs, job.memory_bytes // 4, listed=job.combine is None, adds=job.adds)
        for data in buckets:
            board.team.check_peers()
            num_keys += grouper.add_packed(data)
            num_bytes += len(data)
        return write_blocks(local.reduced, _reduced(job, grouper, board), job.memory_bytes // 128)
    except BaseException:
        local.reduced.truncate(begin)
        raise
    finally:
        runs.close()
        release_freed_values(num_bytes, num_keys)


def _write(folder: str, local: RankOutputs, partition: int, partitions: int) -> None:
    write_part(folder, partition, partitions, lambda: read_blocks(local.reduced, local.results[partition]))


def _reduced(job: MapReduceJob, grouper: Grouper, board: Board) -> Iterator[tuple[Any, Any]]:
    for number, (key, values) in enumerate(grouper.groups()):
        if not number % _CHECK_EVERY:
            board.team.check_peers()  # raise now if another rank has ended, not after all keys
        try:
            value = job.reduce(key, values)
        except Exception as error:
            raise TaskError(
                f"map_reduce: reduce failed for key {key!r:.200}: {summary_of(error)}\n{_format_error(error)}"
            ) from error
        yield key, value
