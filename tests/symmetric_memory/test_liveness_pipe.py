"""Pipes tell that a rank is gone where no pidfd can."""

import dataclasses
import os
import select

import pytest

from phalanx._comm.symmetric_memory.liveness_pipe import (
    MOST_RANKS,
    LivenessPipes,
    needs_liveness_pipes,
    new_pipes,
    why_unwatched,
)
from phalanx._comm.symmetric_memory.watch import ProcessId

ME = ProcessId.of_self()
ELSEWHERE = dataclasses.replace(ME, namespace="pid:[1] time:[2]")
FILTERED = dataclasses.replace(ME, has_pidfds=False)


def ended(fd):
    return bool(select.select([fd], [], [], 0)[0])


def test_only_ranks_that_cannot_watch_each_other_need_them():
    assert not needs_liveness_pipes([ME, ME])
    assert not needs_liveness_pipes([FILTERED])
    assert needs_liveness_pipes([ME, ELSEWHERE])
    assert needs_liveness_pipes([FILTERED, FILTERED])


def test_so_many_ranks_as_one_message_holds_no_more():
    assert why_unwatched([FILTERED] * MOST_RANKS) == ""
    assert why_unwatched([ME] * (MOST_RANKS + 1)) == ""
    assert why_unwatched([FILTERED] * (MOST_RANKS + 1)).startswith("251 ranks of one host cannot watch each other: ")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_others_see_a_rank_that_lets_go(world_size):
    before = set(os.listdir("/proc/self/fd"))
    with new_pipes(world_size) as (reads, writes):
        ranks = [LivenessPipes([*reads, writes[r]], r) for r in range(world_size)]
    for leaving, lines in enumerate(ranks):
        assert lines.fds[leaving] == -1
        lines.close()
        for other in ranks[leaving + 1 :]:
            assert [ended(fd) if fd >= 0 else None for fd in other.fds][: leaving + 1] == [True] * (leaving + 1)
            assert not any(ended(fd) for fd in other.fds[leaving + 1 :] if fd >= 0)
        lines.close()  # again: nothing happens
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_is_killed_lets_go_and_a_child_of_the_leader_holds_nothing_back():
    with new_pipes(2) as (reads, writes):
        child = os.fork()
        if child == 0:
            lines = LivenessPipes([*reads, writes[1]], 1)
            os.kill(os.getpid(), 9)
        lines = LivenessPipes([*reads, writes[0]], 0)
    select.select([lines.fds[1]], [], [], 20)
    assert ended(lines.fds[1])
    os.waitpid(child, 0)
    lines.close()
