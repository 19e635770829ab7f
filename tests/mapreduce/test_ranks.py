"""Any number of ranks gives what one process gives, bit by bit, and hears of a mistake on any of them."""

import operator
import random
import resource
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from phalanx._base.deadline import Deadline
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx.mapreduce import TaskError, attempt, map_reduce, team
from phalanx.mapreduce.board import Board, OpenTask, choose_idle_task
from phalanx.mapreduce.team import Team
from phalanx.testing import run_ranks


def count(line):
    for word in line.split():
        yield word, 1


def add_up(key, values):
    return sum(values)


def fractions(number):
    """Values whose sum depends on the order in which they are added."""
    rng = random.Random(number)
    yield number % 5, rng.uniform(-1, 1) * 10 ** rng.randrange(12)


def all_of(rank, world_size, folder):
    """Many jobs, one after another, in one group; the results of each."""
    found = []
    for split_bytes, memory, combine in [(50, 1 << 20, operator.add), (333, 1 << 26, None), (10**6, 1 << 20, None)]:
        for gather in (True, False):
            result = map_reduce(
                [f"{folder}/*.txt"], count, add_up, combine=combine, gather=gather, split_bytes=split_bytes,
                memory_bytes=memory, partitions=5, max_bad_records=None,
            )  # fmt: skip
            found.append((list(result), result.partitions, result.counters.records, result.counters.num_bad_records))
    for combine in (operator.add, None):
        result = map_reduce(range(3000), fractions, lambda k, v: sum(v), combine=combine, gather=True, split_records=70)
        found.append(([(key, value.hex()) for key, value in result], (), 0, 0))
    with map_reduce(
        range(40), lambda n: [(n % 3, "x" * 10**5)], lambda k, v: len("".join(v)), memory_bytes=1 << 20
    ) as big:
        found.append((list(big), big.partitions, 0, 0))
    out = f"{folder}/out-{world_size}"
    result = map_reduce([f"{folder}/*.txt"], count, add_up, output=out, partitions=3, max_bad_records=None)
    assert all(path.is_file() for path in result.files)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_results_do_not_depend_on_the_number_of_ranks(tmp_path, backend):
    rng = random.Random(11)
    for number in range(4):
        lines = [bytes(rng.choices(b"abc \xff\n", (5, 5, 5, 9, 0.1, 2), k=300)) for _ in range(number)]
        (tmp_path / f"{number}.txt").write_bytes(b"\n".join(lines))
    alone = all_of(0, 1, tmp_path)
    lines = [line for n in range(4) for line in (tmp_path / f"{n}.txt").read_bytes().split(b"\n")]
    text = b" ".join(line for line in lines if b"\xff" not in line)
    assert dict(alone[0][0]) == Counter(text.decode().split())
    parts = [path.read_bytes() for path in sorted((tmp_path / "out-1").iterdir())]
    for world_size in (2, 3, 4) if backend == "phalanx" else (3,):
        ranks = run_ranks(all_of, world_size, tmp_path, backend=backend)
        for number, whole in enumerate(alone):
            each = [found[number] for found in ranks]
            if each[0][1] == whole[1]:  # gathered: all have all
                assert all(one == whole for one in each)
            else:
                assert sorted(pair for one in each for pair in one[0]) == whole[0]
                assert sorted(p for one in each for p in one[1]) == list(whole[1])
                assert all(one[2:] == whole[2:] for one in each)
        written = sorted((tmp_path / f"out-{world_size}").iterdir())
        assert [path.read_bytes() for path in written] == parts


def mistakes(rank, world_size, folder):
    """What each rank hears, job after job, in a group that goes on."""

    def hear(*args, **kwargs):
        try:
            map_reduce(*args, **kwargs)
        except Exception as error:
            return type(error).__name__, str(error)
        return "nothing", ""

    def yields_nonsense(number):
        return [7] if number == 3 else [(number, 1)]

    def divide(key, values):
        return 1 // (key - 5)

    def mixed(number):
        return [(str(number) if number == 3 else number, 1)]

    def bad(number):
        raise ArithmeticError("bad luck")

    def reads(path):
        return [(path, 1)]

    told = [
        hear([f"{folder}/nothing*"], count, add_up),
        hear(range(9), yields_nonsense, add_up),
        hear(range(9), lambda n: [(n, n)], divide),
        hear(range(9), mixed, add_up),
        hear(range(900), bad, add_up, split_records=10),
        hear(range(9 + rank), lambda n: [(n, 1)], add_up),
        hear(range(9), lambda n: [({1}, 1)], add_up),
        hear(range(9), lambda n: [(n, 1)], lambda k, v: {1}, output=f"{folder}/out"),
    ]
    group = dist.new_group([0, 1])
    if rank == 2:
        told.append(hear([1], reads, add_up, group=dist.GroupMember.NON_GROUP_MEMBER))
    else:
        told.append(
            ("nothing", str(dict(map_reduce(range(5), lambda n: [(n % 2, 1)], add_up, gather=True, group=group))))
        )
    return told


def test_a_mistake_is_heard_on_every_rank_and_the_group_goes_on(tmp_path):
    ranks = run_ranks(mistakes, 3, tmp_path)
    want = [
        ("FileNotFoundError", "no file matches"),
        ("TypeError", "map must yield (key, value) pairs, but yielded 7"),
        ("TaskError", "reduce failed for key 5: ZeroDivisionError"),
        ("TypeError", "keys of different kinds cannot be sorted: number, str"),
        ("TaskError", "ArithmeticError: bad luck"),
        ("ValueError", "rank 1: inputs=10 records\n  rank 2: inputs=11 records"),
        ("TypeError", "cannot be hashed"),
        ("TypeError", "cannot be written as JSON"),
    ]
    for told in ranks:
        for (kind, text), (want_kind, want_text) in zip(told, want, strict=False):
            assert (kind, want_text in text) == (want_kind, True), (kind, text)
    assert ranks[0][-1] == ranks[1][-1] == ("nothing", "{0: 3, 1: 2}")
    assert "this rank is not in the group" in ranks[2][-1][1]


def outlive_the_rank_that_found_a_problem(rank, world_size, folder):
    """Rank 1 cannot reduce its partition, and ends; rank 0 looks at its peers only after that."""
    team.CHECK_S = 0.0
    pid_file = Path(folder, "rank 1")

    def reduce(key, values):
        if rank == 1:
            pid_file.with_suffix(".new").write_text(repr(ProcessId.of_self()))
            pid_file.with_suffix(".new").rename(pid_file)
            raise ArithmeticError("bad luck")
        Deadline.after(None).wait_until(pid_file.exists, 0.001)
        process = eval(pid_file.read_text(), {"ProcessId": ProcessId})
        Deadline.after(None).wait_until(process.has_ended, 0.001)
        return 1

    try:
        map_reduce(range(1000), lambda n: [(n, n)], reduce, partitions=2)
    except Exception as error:
        return type(error).__name__, str(error)


def test_a_problem_is_raised_though_the_rank_that_found_it_has_ended(tmp_path):
    """A slow rank saw that the other had ended before it saw why, and raised PeerLostError."""
    for kind, text in run_ranks(outlive_the_rank_that_found_a_problem, 2, tmp_path):
        assert (kind, "ArithmeticError: bad luck" in text) == ("TaskError", True), text


def unreadable_on_rank_1(rank, world_size):
    """A sequence that rank 1 cannot read: the others do its tasks, and it theirs again never."""

    class Data:
        def __len__(self):
            return 12

        def __getitem__(self, index):
            if rank == 1:
                raise MemoryError("no room here")
            return index

    result = map_reduce(Data(), lambda n: [(n, n)], add_up, split_records=1, gather=True, max_attempts=3)
    return dict(result), result.num_retries


def test_a_task_that_fails_on_one_rank_is_done_by_another():
    ranks = run_ranks(unreadable_on_rank_1, 3)
    assert [result for result, _ in ranks] == [{n: n for n in range(12)}] * 3
    assert ranks[0][1] == ranks[2][1] == 0


def straggling(rank, world_size, folder):
    """Rank 0 does not get on with its task before another rank has come to the end of that one."""
    folder = Path(folder)

    def slow(number):
        if rank == 0:
            (folder / "rank 0 has begun").touch()
            wait_for(folder / f"{number // 30 * 30 + 29} by another")
        else:
            wait_for(folder / "rank 0 has begun")
            (folder / f"{number} by another").touch()
        return [(number % 3, 1)]

    result = map_reduce(range(60), slow, add_up, split_records=30, gather=True)
    return dict(result), result.num_backups, result.counters.records


def wait_for(path):
    until = time.monotonic() + 40
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.001)


def test_the_task_of_a_straggler_is_done_by_another_rank_too_and_counts_once(tmp_path):
    ranks = run_ranks(straggling, 2, tmp_path)
    assert [result for result, _, _ in ranks] == [{0: 20, 1: 20, 2: 20}] * 2
    assert [backups for _, backups, _ in ranks] == [0, 1]
    assert ranks[0][2] == 60


def hoarding(rank, world_size, combine):
    """For 60 MB of values: how much more a rank has held at its most than before, in MiB, and how long they were."""
    map_reduce(range(100), lambda n: [(n, "x" * 1000)], lambda key, values: 0)  # what of torch and the group is loaded
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = status("VmRSS")

    def long_values(number):
        yield number % 1000, f"{number}-" * (20_000 // (len(str(number)) + 1))

    def total_length(key, values):
        return sum(len(value) for value in values)

    result = map_reduce(
        range(3000), long_values, total_length, combine=combine, memory_bytes=8 << 20, split_records=500
    )
    return (status("VmHWM") - before) >> 10, sum(count for _, count in result)


def status(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


@pytest.mark.slow(but=("combined",))
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark")
@pytest.mark.parametrize("combine", [None, operator.add], ids=["listed", "combined"])
def test_a_rank_holds_about_as_much_as_it_may(combine):
    """8 MiB are asked for; the pairs of a block, and a partition on its way come on top."""
    for world_size in (1, 2):
        ranks = run_ranks(hoarding, world_size, combine, init=world_size > 1)
        assert sum(length for _, length in ranks) > 58_000_000
        assert max(held for held, _ in ranks) < 12, ranks


def hoarding_large_values(rank, world_size, combine):
    """For 150 values of a MB each: how much more a rank has held at its most than before, in MiB; their sum."""
    map_reduce(range(100), lambda n: [(n, "x" * 1000)], lambda key, values: 0, gather=True)  # the group's own memory
    before = status("RssAnon")
    held = [0]

    def array(number):
        held[0] = max(held[0], status("RssAnon") - before)
        yield number % 20, np.full(125_000, number, np.float64)

    def total(key, values):
        found = 0.0
        for value in values:
            held[0] = max(held[0], status("RssAnon") - before)
            found += float(value[0])
        return found

    result = map_reduce(range(150), array, total, combine=combine, memory_bytes=16 << 20, split_records=25)
    return held[0] >> 10, sum(one for _, one in result)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of what a process holds")
@pytest.mark.parametrize("combine", [None, operator.add], ids=["listed", "combined"])
def test_a_rank_holds_no_more_than_it_may_of_values_of_a_mb_each(combine):
    """It held 18 MiB for 16: sixteen values at a time, and of arrays four times as many as it knew of."""
    ranks = run_ranks(hoarding_large_values, 2, combine)
    assert sum(found for _, found in ranks) == sum(range(150))
    assert max(held for held, _ in ranks) <= 16, ranks


def shuffling(rank, world_size):
    """A hundred rounds of a MiB for each: how much more is held behind them, in MiB."""
    team, part = Team.of(None), bytes(1 << 19)
    team.all_to_all([part] * world_size, [len(part)] * world_size)
    before = status("RssAnon")
    received = []
    for _ in range(100):  # what came last is there while the next is on its way
        received = team.all_to_all([part] * world_size, [len(part)] * world_size)
    return (status("RssAnon") - before) >> 10, len(received)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of what a process holds")
def test_what_went_through_the_shuffle_is_not_held():
    """glibc found nothing that it had freed good enough for torch's aligned tensors: a rank held all it had got."""
    ranks = run_ranks(shuffling, 2)
    assert max(held for held, _ in ranks) < 20, ranks


def disk_is_full(rank, world_size):
    """Rank 1 can write files of a MiB: the others do its tasks, but what they send it can be kept nowhere."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        map_reduce(range(400), lambda n: [(n, "x" * 20_000)], lambda key, values: 1, memory_bytes=1 << 20)
    except TaskError as error:
        told = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return told, dict(map_reduce(range(9), lambda n: [(n % 2, 1)], add_up, gather=True))


def test_a_disk_that_is_full_in_the_shuffle_is_heard_of_on_every_rank():
    """The rank that could not keep what it received raised alone, and the others waited for it until time was out."""
    for told, result in run_ranks(disk_is_full, 3):
        assert "map_reduce: data of the shuffle could not be written to disk" in told
        assert "  rank 1: [Errno 27] File too large" in told
        assert "Is the disk full?" in told
        assert result == {0: 5, 1: 4}


def problem_after_the_last_task(rank, world_size, folder):
    """Rank 1 says that the job cannot go on when rank 0 has already seen that all tasks are done."""
    begun, seen = Path(folder, "rank 1 has begun"), Path(folder, "rank 0 has seen all done")
    finish, do_map = Board.finish, attempt._map

    def finish_and_complain(board, task, seconds):
        first = finish(board, task, seconds)
        wait_for(seen)
        board.fail_job("TaskError", "said late")
        return first

    def map_and_tell(*args):
        do_map(*args)
        seen.touch()

    def mapped(number):
        if rank == 1:
            begun.touch()
        else:
            wait_for(begun)
        return [(number, 1)]

    if rank == 1:
        Board.finish = finish_and_complain
    else:
        attempt._map = map_and_tell
    try:
        map_reduce(range(2), mapped, add_up, split_records=1)
    except TaskError as error:
        return str(error)


def test_a_problem_that_is_found_when_all_tasks_are_done_is_heard_on_every_rank(tmp_path):
    """The others had gone on to tell each other what they have, and waited there for the one that had raised."""
    assert run_ranks(problem_after_the_last_task, 2, tmp_path) == ["said late\n(Raised on rank 1.)"] * 2


def test_what_an_idle_rank_does():
    def open_task(task, runs=1, failures=0, failed_here=False, ran_here=False, for_s=0.0):
        return OpenTask(task, runs, failures, failed_here, ran_here, for_s)

    assert choose_idle_task([open_task(1)], 2, 1.0) is None
    assert choose_idle_task([open_task(1, for_s=2.0)], 2, 1.0) == 1  # a straggler's
    assert choose_idle_task([open_task(1, for_s=2.0, ran_here=True)], 2, 1.0) is None
    assert choose_idle_task([open_task(1, 2, for_s=2), open_task(4, for_s=2)], 2, 1.0) == 4
    assert choose_idle_task([open_task(1, failures=1)], 2, 1.0) == 1  # failed elsewhere
    assert choose_idle_task([open_task(1, failures=1, failed_here=True, ran_here=True)], 2, 1.0) is None
    assert choose_idle_task([open_task(1, runs=2, failures=1)], 2, 1.0) is None  # somebody does it again
    assert choose_idle_task([open_task(1, 2, 2, True, True)], 2, 1.0) == 1  # it failed everywhere
    assert choose_idle_task([open_task(1, 1, 1, True, True)], 1, 1.0) == 1  # there is nobody else
