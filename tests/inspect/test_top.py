"""How a rank's time divides, who is slowest, how far a job is, and how that fits the terminal: without a process."""

import io
import itertools
import json
import os
import random
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from phalanx._base.core_numbers import ALL_REDUCE, BROADCAST, GRADIENTS, RECV
from phalanx._comm.diagnostics.progress_page import RankProgress, Track
from phalanx._job.inspect.top.as_json import as_json
from phalanx._job.inspect.top.look import (
    MAX_OPERATIONS,
    GroupSnapshot,
    HostSnapshot,
    MemberSnapshot,
    RankOperation,
    RankSnapshot,
    from_json,
    to_json,
)
from phalanx._job.inspect.top.memory import Memory, MemoryReader
from phalanx._job.inspect.top.prometheus import as_prometheus
from phalanx._job.inspect.top.screen import _Screen
from phalanx._job.inspect.top.table import all_lines, as_text, page, table
from phalanx._job.inspect.top.times import LatenessOfRank, Times, add, measure
from phalanx._job.inspect.top.view import SHARES, _shares, view
from phalanx._job.report.live_page import LivePage

MS = 1_000_000
NOW = 5_000 * MS


def all_reduce(seq, enter_ms, leave_ms, kind=ALL_REDUCE, root=-1):
    label = f"all_reduce #{seq} (/data/train.py:8)"
    return RankOperation(seq, kind, root, enter_ms * MS, leave_ms * MS, label)


def host(
    operations,
    *,
    node=0,
    num_nodes=1,
    ranks=None,
    states=(),
    progress=(),
    world_size=None,
    group="dp",
    ended=(),
    lost=(),
):
    """Whose rank `i` is process 100 + i, and did `operations[i]` in one group."""
    numbers = list(range(len(operations)) if ranks is None else ranks)
    size = len(numbers) if world_size is None else world_size
    pages = list(progress) or [None] * len(numbers)
    letters = list(states) or ["S"] * len(numbers)
    return HostSnapshot(
        name=f"host{node}",
        node=node,
        num_nodes=num_nodes,
        agent=7,
        target="/data/train.py",
        world_size=size,
        restart_count=0,
        max_restarts=0,
        generation=0,
        started_ns=0,
        at_ns=NOW,
        ended=tuple(ended),
        lost=tuple(lost),
        ranks=tuple(
            RankSnapshot(rank, 100 + rank, state, Memory(300 << 20, True), said)
            for rank, state, said in zip(numbers, letters, pages, strict=True)
        ),
        groups=(
            GroupSnapshot(
                group,
                size,
                tuple(MemberSnapshot(rank, 100 + rank, tuple(o)) for rank, o in zip(numbers, operations, strict=True)),
            ),
        ),
    )


def test_time_in_an_operation_is_waiting_until_the_last_has_come_and_then_communication():
    early, late = [all_reduce(1, 4000, 4700)], [all_reduce(1, 4600, 4700)]
    measured = measure([host([early, late])], 0)
    assert measured.times == {
        (0, 100): Times(NOW, 600 * MS, 100 * MS),
        (0, 101): Times(NOW, 0, 100 * MS),
    }
    assert measured.lateness == {(0, 101): LatenessOfRank(1, 600 * MS)}
    assert measured.num_operations == 1
    assert measured.stuck is None


def test_the_first_round_of_another_reducer_is_not_the_first_round_of_the_one_before():
    """Each reducer counts its rounds from 1. A rank that had not come to the second one's first round counted as there,
    as it had been in the first one's, and the rank that waited for it counted as late.
    """
    ours = [all_reduce(1, 1000, 1100, kind=GRADIENTS), all_reduce(1, 2000, 0, kind=GRADIENTS)]
    theirs = [all_reduce(1, 1050, 1100, kind=GRADIENTS)]
    measured = measure([host([ours, theirs])], 0)
    assert measured.stuck is not None
    assert (measured.stuck.inside, measured.stuck.missing) == (((0, 100),), ((0, 101),))
    assert measured.lateness == {(0, 101): LatenessOfRank(1, 50 * MS)}
    assert measured.times[0, 100].waiting_ns == (50 + 3000) * MS


def test_overlapping_operations_are_counted_once_and_only_since_the_last_look():
    ours = [all_reduce(1, 1000, 3000), all_reduce(2, 2000, 4000), all_reduce(3, 4500, 0)]
    theirs = [all_reduce(1, 1000, 3000), all_reduce(2, 2000, 4000), all_reduce(3, 4500, 0)]
    times = measure([host([ours, theirs])], 2500 * MS).times[0, 100]
    assert times == Times(2500 * MS, 0, (1500 + 500) * MS)


def test_who_waits_for_one_that_has_not_come_is_told_with_the_one():
    stuck = measure([host([[all_reduce(2, 1000, 0)], [all_reduce(1, 500, 600)], [all_reduce(2, 1200, 0)]])], 0).stuck
    assert stuck is not None
    assert (stuck.inside, stuck.missing, stuck.waited_ns) == (((0, 100), (0, 102)), ((0, 101),), 4000 * MS)
    times = measure([host([[all_reduce(2, 1000, 0)], []])], 0).times[0, 100]
    assert (times.waiting_ns, times.moving_ns) == (4000 * MS, 0)


def test_in_a_broadcast_only_the_root_is_waited_for_and_messages_are_left_out():
    root = [all_reduce(1, 2000, 2100, kind=BROADCAST, root=0)]
    early, late = ([all_reduce(1, at, at + 300, kind=BROADCAST, root=0)] for at in (1900, 4000))
    measured = measure([host([root, early, late])], 0)
    assert measured.times[0, 101] == Times(NOW, 100 * MS, 200 * MS)
    assert measured.times[0, 102] == Times(NOW, 0, 300 * MS)
    assert measured.lateness == {}
    assert measure([host([[all_reduce(1, 10, 0, kind=RECV)], []])], 0).times == {}


def test_outside_of_operations_a_rank_is_idle_for_as_long_as_no_processor_worked_for_it():
    """A rank that waited for its DataLoader was "computing" for all of the time."""
    seen = host([[all_reduce(1, 4000, 4500)], [all_reduce(1, 4500, 4500)]])
    ranks = tuple(replace(rank, processor_ns=5000 * MS + rank.rank * 900 * MS) for rank in seen.ranks)
    seen = replace(seen, ranks=ranks)
    measured = measure([seen], 4000 * MS, {(0, 100): 4800 * MS, (0, 101): 5000 * MS})
    assert measured.times[0, 100] == Times(1000 * MS, 500 * MS, 0, idle_ns=300 * MS, outside_ns=500 * MS)
    assert measured.times[0, 101] == Times(1000 * MS, 0, 0, idle_ns=100 * MS, outside_ns=1000 * MS)
    both = add([measured, measured])
    first, second = view([seen], both).ranks
    assert (first.computing, first.idle, first.waiting) == pytest.approx((0.2, 0.3, 0.5))
    assert (second.computing, second.idle, second.waiting) == pytest.approx((0.9, 0.1, 0.0))
    assert "computing" in table(view([seen], both), None)[1][1].plain
    still = measure([seen], 4000 * MS, {(0, 101): 5900 * MS})
    assert "idle (its DataLoader, a disk, a device?)" in table(view([seen], still), None)[1][1].plain


class Seen:
    """A watch with one sample."""

    def __init__(self, job):
        self.sample = lambda: job


def test_where_the_recorders_hold_less_no_view_tells_computing_from_idle():
    """`top --web` drew all of that time as "computing"; ranks that slept were among them."""
    busy = [all_reduce(n, 4900 + n, 4901 + n) for n in range(1, MAX_OPERATIONS + 1)]
    seen = host([busy, busy])
    seen = replace(seen, ranks=tuple(replace(rank, processor_ns=5000 * MS) for rank in seen.ranks))
    measured = measure([seen], 1000 * MS, {(0, 100): 0, (0, 101): 0})
    job = view([seen], measured)
    for rank in job.ranks:
        shares = {name: getattr(rank, name) for name in SHARES}
        assert shares.pop("computing") is shares.pop("idle") is None
        assert sum(shares.values()) == pytest.approx(1)
        assert 0 < rank.computing_or_idle < 1
    share = job.ranks[0].computing_or_idle
    row = table(job, None)[1][1].plain
    assert f" ≤{100 * share:.0f}% " in row
    assert row.endswith("computing or idle")
    first = json.loads(as_json(job))["ranks"][0]
    assert (first["computing"], first["idle"], first["computing_or_idle"]) == (None, None, share)
    assert re.findall(r'rank="0".*part="(\w+)"', as_prometheus(job)) == [
        "computing_or_idle",
        "waiting",
        "communicating",
    ]
    page = LivePage(Seen(job)).pages["/now"]().content.decode()
    assert re.findall(r"</i>([a-z ]+)</li>", page) == ["computing or idle", "waiting", "communicating"]
    assert re.findall(r"title='([a-z ]+): ", page)[:3] == ["computing or idle", "waiting", "communicating"]


def test_shares_are_never_below_zero():
    """The rest of a difference of floats was: `top` showed -0%."""
    dice = random.Random(0)
    for _ in range(300):
        span, waiting, moving = dice.randrange(10**9, 10**10), dice.randrange(10**8), dice.randrange(10**8)
        outside = span - waiting - moving
        shares = _shares(Times(span, waiting, moving, outside, outside))
        assert all(share is None or share >= 0.0 for share in shares.values())


def test_the_curves_of_a_page_go_on_where_the_job_starts_again():
    """They ran backwards: a point's time was that of the attempt."""
    elapsed = iter([400.0, 410.0, 2.0, 12.0, 22.0])
    clock = itertools.count(step=10.0)
    watch = Seen(None)
    job = view([host([[all_reduce(1, 100, 200)]] * 2)], None)
    ranks = tuple(replace(rank, memory_bytes=1 << 30) for rank in job.ranks)
    watch.sample = lambda: replace(job, ranks=ranks, elapsed_s=next(elapsed))
    now = LivePage(watch, lambda: next(clock)).pages["/now"]
    for _ in range(5):
        text = now().content.decode()
    lines = re.findall(r"<polyline[^>]*points=['\"]([^'\"]+)", text)
    assert lines
    for line in lines:
        at = [float(point.split(",")[0]) for point in line.split()]
        assert at == sorted(at)


def test_recorders_that_hold_a_moment_are_looked_at_for_that_moment():
    """What was written over is not known: nobody was "computing" meanwhile."""
    busy = [all_reduce(n, 4900 + n, 4901 + n) for n in range(1, MAX_OPERATIONS + 1)]
    measured = measure([host([busy, busy])], 0)
    assert measured.span_ns == NOW - 4901 * MS
    assert measured.times[0, 100].moving_ns == MAX_OPERATIONS * MS


def test_groups_that_follow_each_other_under_one_name_are_not_mixed_up():
    """After a loss the ranks form their group anew: its operations count from 1 again."""
    old, new = host([[all_reduce(1, 100, 200)]] * 2), host([[all_reduce(1, 4000, 4400)], [all_reduce(1, 4300, 4400)]])
    both = HostSnapshot(**{**vars(new), "groups": (*old.groups, *new.groups)})
    assert measure([both], 0).times[0, 100] == Times(NOW, 300 * MS, 200 * MS)


def test_ranks_of_several_hosts_are_put_on_one_clock():
    here = host([[all_reduce(1, 4000, 4500)]], num_nodes=2, world_size=2)
    progress = RankProgress(0, Track(5, None, 40, ((NOW, 40),)), None)
    there = host([[all_reduce(1, 4400, 4500)]], node=1, num_nodes=2, ranks=[1], world_size=2, progress=[progress])
    ahead = from_json(to_json(there), "host1 (10.0.0.2)", 1000 * MS)
    assert ahead.ranks[0].progress.loop.recent == ((NOW + 1000 * MS, 40),)
    assert ahead.at_ns == NOW + 1000 * MS
    same = from_json(to_json(there), "host1", 0)
    assert same == there
    measured = measure([here, same], 0)
    assert measured.times[0, 100] == Times(NOW, 400 * MS, 100 * MS)
    assert measured.lateness == {(1, 101): LatenessOfRank(1, 400 * MS)}
    assert from_json('{"why": "does not answer"}', "host1", 0) == "does not answer"
    unseen = measure([here], 0)
    assert unseen.times[0, 100] == Times(NOW, 0, 500 * MS)


@pytest.mark.parametrize("seed", range(30))
def test_shares_always_make_a_whole_and_survive_anything_that_a_recorder_may_hold(seed):
    draw = random.Random(seed)
    size = draw.choice([1, 2, 3, 5])
    logs = []
    for _ in range(size):
        at, operations = draw.randrange(4000), []
        for seq in range(draw.choice([0, 1, 5, 90])):
            at += draw.randrange(20)
            leave = at + draw.randrange(200) if draw.random() < 0.9 else 0
            kind = draw.choice([ALL_REDUCE, BROADCAST, RECV, GRADIENTS])
            operations.append(all_reduce(seq + draw.choice([1, 2]), at, leave, kind=kind, root=draw.randrange(size)))
        logs.append(operations)
    look = host(logs)
    measured = add([measure([look], 0), measure([look], 4500 * MS)])
    for times in measured.times.values():
        assert times.waiting_ns >= 0
        assert times.moving_ns >= 0
        assert times.waiting_ns + times.moving_ns <= times.span_ns
    job = view([look], measured)
    json.loads(as_json(job))
    for width in (5, 40, 80, 300):
        for height in (1, 5, 24):
            lines, _ = page(job, width, height, offset=draw.randrange(10))
            assert len(lines) <= max(2, height)
            assert all(len(line.plain) <= width for line in lines)


def steps(count, every_ms, samples=32, total=100, last_ms=5000):
    recent = tuple(((last_ms - every_ms * (count - i)) * MS, samples * i) for i in range(count + 1))
    return RankProgress(0, Track(count, total, samples * count, recent), None)


def test_the_step_is_the_one_that_all_have_done_and_samples_are_those_of_all():
    job = view([host([[], []], progress=[steps(9, 100), steps(10, 100)])], None)
    assert job.pace.step == 9
    assert job.pace.steps_per_s == pytest.approx(10)
    assert job.pace.samples_per_s == pytest.approx(640)
    assert "step 9 of 100, 10.0 steps/s, 640 samples/s, 0:09 left in this loop" in as_text(all_lines(job, None))


def test_the_pace_falls_when_steps_stop_coming():
    job = view([host([[]], progress=[steps(10, 10, last_ms=1000)])], None)
    assert job.pace.steps_per_s == pytest.approx(10 / 4.1)


def test_committed_steps_go_before_those_of_a_loop_and_rounds_are_the_last_resort():
    loop = steps(3, 100)
    state = RankProgress(2, loop.loop, Track(700, None, 0, ((4000 * MS, 0), (4500 * MS, 0))))
    job = view([host([[]], progress=[state])], None)
    assert (job.pace.steps_of, job.pace.step, job.generation) == ("phalanx.elastic.State", 700, 2)
    assert job.pace.steps_per_s == pytest.approx(2)
    assert job.pace.samples_per_s is not None  # the loop knows
    rounds = [all_reduce(n, 4400 + 100 * n, 4450 + 100 * n, kind=GRADIENTS) for n in range(1, 6)]
    job = view([host([rounds])], None)
    assert (job.pace.step, job.pace.steps_per_s) == (5, pytest.approx(10))
    assert "(rounds of gradients)" in as_text(all_lines(job, None))


def many(num_ranks):
    """A job in which the last rank is 30 ms later than the others to each of 20 operations."""
    logs = []
    for rank in range(num_ranks):
        late = 30 if rank == num_ranks - 1 else 0
        logs.append([all_reduce(n, 3000 + 100 * n + late, 3040 + 100 * n) for n in range(20)])
    look = host(logs, progress=[steps(9, 100)] * num_ranks)
    return view([look], measure([look], 3000 * MS))


def test_the_slowest_is_named_with_what_it_costs():
    text = as_text(all_lines(many(4), None))
    assert "slowest: rank 3, last to 20 of 20 operations; the others wait for it alone 30% of the time" in text


def test_two_hundred_ranks_fit_eighty_columns_and_can_be_scrolled():
    job = many(200)
    lines = [line.plain for line in page(job, 80, 24)[0]]
    assert len(lines) == 24
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1].endswith("arrows, PgUp, PgDn: lines 1-17 of 200")
    last = [line.plain for line in page(job, 80, 24, offset=10**6)[0]]
    assert last[-2].split()[0] == "199"
    slow = [line.plain for line in page(job, 80, 24, slowest_first=True)[0]]
    assert slow[slow.index(next(line for line in slow if line.startswith("rank "))) + 1].split()[0] == "199"
    assert len(as_text(all_lines(job, None)).splitlines()) == 3 + 2 + 200


def test_keys_that_arrive_together_all_count_and_scrolling_ends_at_the_last_row():
    """Held keys did nothing, and each press beyond the end had to be taken back."""
    screen = _Screen(Console(file=io.StringIO(), width=80, height=24))
    screen.job = many(200)
    assert screen.press("jj\x1b[B\x1b[6~")
    screen.draw()
    assert screen.offset == 13
    screen.press("\x1b[6~" * 30)
    screen.draw()
    assert screen.offset == 183
    screen.press("k")
    assert screen.offset == 182
    assert not screen.press("sq")
    assert not screen.press("")


def test_columns_make_way_where_the_terminal_is_narrow():
    job = many(3)
    headings = {
        width: next(line.plain for line in page(job, width, 24)[0] if line.plain.lstrip().startswith("rank "))
        for width in (80, 60, 40)
    }
    assert headings[80].split() == ["rank", "pid", "step", "samples/s", "comp", "wait", "comm", "memory", "now"]
    assert "pid" not in headings[60]
    assert headings[40].split()[0] == "rank"
    assert "wait" in headings[40]


def test_a_rank_that_has_ended_or_stopped_is_said():
    look = host([[], []], states=["T", "D"], ended=[(2, 1)], lost=[(1, 17, NOW - 65_000 * MS, "SIGKILL")], world_size=3)
    text = as_text(all_lines(view([look], None), None))
    assert "stopped (SIGSTOP or Ctrl-Z)" in text
    assert "a disk?" in text
    assert "ended: rank 2 (exit code 1)" in text
    assert "lost so far: 1 rank, the last one rank 1 (pid 17), 1:05 ago: SIGKILL" in text
    empty = as_text(all_lines(view([host([])], None), None))
    assert empty == "Job 7: train.py, no rank is running: it is starting, or ending"


def test_memory_is_the_fair_share_and_asked_for_every_ten_seconds_at_most(monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr("phalanx._job.inspect.top.memory.time.monotonic", lambda: now[0])
    reader = MemoryReader()
    first = reader.read(os.getpid())
    assert first.is_pss
    held = bytearray(os.urandom(1)) * (64 << 20)
    assert reader.read(os.getpid()) == first
    now[0] += 11
    assert reader.read(os.getpid()).num_bytes > first.num_bytes + (32 << 20)
    del held
    assert reader.read(1 << 30) is None
    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)  # a zombie, until it is reaped
    assert reader.read(ended) is None
    os.waitpid(ended, 0)


def test_the_host_that_was_asked_tells_of_the_job_whatever_its_number():
    """A host of a lower number told, which does not lead any more: its command, and no losses."""
    leader = host([[]], node=2, num_nodes=2, ranks=[2], lost=((0, 100, 0, "SIGKILL"),))
    job = view([replace(leader, agent=8), host([[]], node=1, num_nodes=2, ranks=[1])], None)
    assert (job.pid, [each.rank for each in job.lost]) == (8, [0])
