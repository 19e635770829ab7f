"""Who is waited for, and who is slower than the others, in recorders drawn by hand."""

from __future__ import annotations

import os
from dataclasses import replace

from phalanx._base.core_numbers import ALL_REDUCE, GRADIENTS
from phalanx._comm.diagnostics.flight_recorder import Record
from phalanx._comm.diagnostics.observer import GroupLog, RankLog
from phalanx._job.agent.watch import (
    LatenessCounter,
    RankWatch,
    SilentProcess,
    describe_slow,
    describe_wait,
    find_silent,
)

S = 1_000_000_000


def record(seq: int, enter_s: float, leave_s: float = 0.0, kind: int = ALL_REDUCE) -> Record:
    return Record(seq, kind, 0, 0, -1, -1, 1, (1,), int(enter_s * S), int(leave_s * S), 0, f"train.py:{seq}")


def group(*ranks: list[Record], name: str = "dp", world_size: int | None = None) -> GroupLog:
    """Rank i is process 100 + i."""
    logs = tuple(RankLog(i, 100 + i, True, False, "", tuple(records)) for i, records in enumerate(ranks))
    return GroupLog(name, world_size or len(ranks), logs)


def silent(*groups: GroupLog, now_s: float, stuck: dict[int, float] | None = None) -> list[SilentProcess]:
    pids = {rank.pid for group in groups for rank in group.ranks} or {100, 101}
    since = {pid: int(at * S) for pid, at in (stuck or {}).items()}
    return find_silent(groups, pids, since, {}, int(now_s * S))


def test_who_has_not_come_to_an_operation_is_waited_for_since_the_first_came() -> None:
    past = record(6, 1, 2)
    log = group([past, record(7, 3)], [past, record(7, 4)], [past])
    assert silent(log, now_s=10) == [SilentProcess(102, 7.0, (100, 101), "all_reduce #7 (train.py:7)")]


def test_who_did_something_in_another_group_meanwhile_is_silent_since_then() -> None:
    log = group([record(7, 3)], [record(6, 1, 2)])
    other = group([], [record(1, 4, 6)], name="tp")
    assert [s.silent_s for s in silent(log, other, now_s=10)] == [4.0]


def test_who_waits_itself_is_not_the_one_that_is_waited_for() -> None:
    dp = group([record(7, 3)], [record(6, 1, 2)], [record(6, 1, 2)])
    tp = group([], [record(1, 4)], [], name="tp")  # rank 1 waits for rank 2 there
    assert [s.pid for s in silent(dp, tp, now_s=10)] == [102]


def test_rounds_of_gradients_are_counted_apart() -> None:
    log = group([record(3, 5, kind=GRADIENTS)], [record(9, 1, 2)])
    assert [s.pid for s in silent(log, now_s=10)] == [101]
    log = group([record(3, 5, kind=GRADIENTS)], [record(3, 5, kind=GRADIENTS)])
    assert silent(log, now_s=10) == []


def test_a_round_of_an_earlier_reducer_with_the_same_number_is_not_the_one_that_the_others_are_in() -> None:
    """A rank that was stopped after the first step, behind which a wrapper makes another reducer, was never found: it
    had been in the first round of gradients, and the others waited in the first round."""
    first = record(1, 1, 2, kind=GRADIENTS)
    log = group([first, record(1, 3, kind=GRADIENTS)], [first])
    assert [s.pid for s in silent(log, now_s=10)] == [101]
    assert silent(log, now_s=10, stuck={101: 4}) == [SilentProcess(101, 6.0, (100,), "gradients #1 (train.py:1)")]
    done = record(1, 2.5, 4, kind=GRADIENTS)
    assert silent(group([first, record(1, 3, kind=GRADIENTS)], [first, done]), now_s=10) == []
    # who is stopped there himself keeps nobody waiting who has been there and gone
    log = group([record(1, 5, kind=GRADIENTS)], [done])
    assert silent(log, now_s=10, stuck={100: 6}) == []


def test_a_process_that_is_stopped_inside_an_operation_holds_up_the_others_there() -> None:
    log = group([record(7, 3)], [record(7, 2)])
    assert silent(log, now_s=10) == []
    assert silent(log, now_s=10, stuck={101: 4}) == [SilentProcess(101, 6.0, (100,), "all_reduce #7 (train.py:7)")]
    log = group([record(7, 3)], [record(7, 2, 5)])  # it has done its part
    assert silent(log, now_s=10, stuck={101: 4}) == []


def test_without_a_recorder_a_process_that_is_stopped_is_silent_since_anybody_did_a_step() -> None:
    assert silent(now_s=10, stuck={101: 4}) == [SilentProcess(101, 6.0, (), "")]
    steps = {100: 9 * S}
    assert find_silent([], {100, 101}, {101: 4 * S}, steps, 10 * S) == [SilentProcess(101, 1.0, (), "")]


def test_a_group_that_has_lost_a_member_is_history() -> None:
    log = group([record(7, 3)], [record(6, 1, 2)], [record(7, 3)])
    assert find_silent([log], {100, 101}, {}, {}, 10 * S) == []


def test_who_has_left_is_not_waited_for() -> None:
    log = group([record(7, 3)], [record(6, 1, 2)])
    left = replace(log, ranks=(log.ranks[0], replace(log.ranks[1], left=True)))
    assert silent(left, now_s=10) == []


def test_a_rank_that_comes_last_and_costs_time_is_slower_than_the_others() -> None:
    late = LatenessCounter()
    for window in range(2):  # the second look sees the first half again
        numbers = range(50 * window, 50 * window + 100)
        late.add([group(*([record(n, n + (0.3 if r == 1 else 0.01 * r), n + 0.4) for n in numbers] for r in range(3)))])
    slow = late.find_slow()
    assert slow is not None
    assert (slow.pid, slow.times, slow.num_operations) == (101, 150, 150)
    assert 0.27 < slow.share < 0.30  # 0.28 s of each second
    assert "rank 1 (pid 101) is slower than the others: in 149 s it entered 150 of 150" in describe_slow(slow, 1)


def test_the_time_between_two_checks_counts_too() -> None:
    """With one operation in each check the span was 0 s, and a delay of 20 µs was 100,000 % of it."""
    late = LatenessCounter()
    for n in range(60):
        late.add([group([record(n, n, n + 0.1)], [record(n, n + 2e-5, n + 0.1)])])
    assert late.find_slow() is None


def test_the_slow_rank_is_the_one_that_comes_last_to_a_round_and_not_the_one_in_the_next_reducers_round() -> None:
    """With two models a rank that had come to the second one's round, of the same number, passed for the last one."""
    late = LatenessCounter()
    for n in range(60):
        first = [record(n, n + (0.3 if rank == 1 else 0.0), n + 0.4, kind=GRADIENTS) for rank in range(2)]
        late.add([group([first[0], record(n, n + 0.6, kind=GRADIENTS)], [first[1]])])
    assert late._times == {101: 60}


def test_nobody_is_slower_where_it_costs_little_or_is_now_one_now_another_or_others_are_elsewhere() -> None:
    numbers = range(100)
    cheap, fair, elsewhere = LatenessCounter(), LatenessCounter(), LatenessCounter()
    cheap.add([group(*([record(n, n + 0.01 * r, n + 0.4) for n in numbers] for r in range(3)))])
    assert cheap.find_slow() is None
    fair.add([group(*([record(n, n + 0.3 * ((n + r) % 3), n + 0.9) for n in numbers] for r in range(3)))])
    assert fair.find_slow() is None
    elsewhere.add(
        [group([record(n, n, n + 0.4) for n in numbers], [record(n, n + 0.3) for n in numbers], world_size=3)]
    )
    assert elsewhere.find_slow() is None


def test_a_silent_rank_is_told_ever_more_rarely_and_killed_only_if_asked_for() -> None:
    own = os.getpid()
    log = group([record(7, 1)], [record(6, 0.5, 0.6)])
    log = replace(log, ranks=(log.ranks[0], replace(log.ranks[1], pid=own)))
    pids = {0: 100, 1: own}
    watch = RankWatch(None, 0.0)
    assert watch.is_due(15.0)
    (suspect,) = watch.check(pids, [log], {}, {}, 15.0)  # the times in the log are long past
    assert (suspect.rank, suspect.evict) == (1, False)
    assert "rank 0 waits for rank 1 (pid" in describe_wait(suspect, {100: 0, own: 1}, [log])
    assert watch.check(pids, [log], {}, {}, 30.0) == []  # it was asked, and has not been confirmed
    assert watch.confirm(pids, [log], {}, 15.1) == []
    (confirmed,) = watch.confirm(pids, [log], {}, 16.0)
    assert confirmed.silent.silent_s >= suspect.silent.silent_s
    (suspect,) = RankWatch(2.0, 0.0).check(pids, [log], {}, {}, 0.4)
    assert suspect.evict


def test_a_pause_of_the_job_is_nobodys_silence() -> None:
    """Seven seconds after Ctrl-Z and `fg`, --evict-after 30 killed a rank that needed ten for each step."""
    own = os.getpid()
    log = group([record(7, 1)], [record(6, 0.5, 0.6)])
    log = replace(log, ranks=(log.ranks[0], replace(log.ranks[1], pid=own)))
    pids = {0: 100, 1: own}
    watch = RankWatch(60.0, 0.0)  # looks every 12 s
    assert watch.check(pids, [log], {}, {}, 12.0)  # it is to be asked, and the pause begins
    assert watch.check(pids, [log], {}, {}, 100.0) == []
    assert watch.confirm(pids, [log], {}, 100.0) == []
    assert watch.check(pids, [log], {}, {}, 112.0) == []
    # the process is stopped as well
    assert find_silent([log], set(pids.values()), {own: 2 * S}, {}, 10 * S, 9 * S)[0].silent_s == 1.0
    assert find_silent([], set(pids.values()), {own: 2 * S}, {}, 10 * S, 9 * S)[0].silent_s == 1.0


def test_who_comes_while_it_is_asked_is_acquitted() -> None:
    own = os.getpid()
    log = group([record(7, 1)], [record(6, 0.5, 0.6)])
    log = replace(log, ranks=(log.ranks[0], replace(log.ranks[1], pid=own)))
    come = replace(log, ranks=(log.ranks[0], replace(log.ranks[1], records=(record(7, 2),))))
    watch = RankWatch(2.0, 0.0)
    assert watch.check({0: 100, 1: own}, [log], {}, {}, 0.4)
    assert watch.confirm({0: 100, 1: own}, [come], {}, 1.0) == []
