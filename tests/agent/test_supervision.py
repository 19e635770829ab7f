import os
import random
import signal

import pytest

from phalanx._base.loss_detection import REPORT_GRACE_S, SAME_SIGNAL_S
from phalanx._job.agent.failure import ExceptionReport, Exit
from phalanx._job.agent.supervision import Kill, ReportStragglers, Signal, Supervision


def running(world_size: int = 3, shutdown_timeout_s: float = 10.0) -> Supervision:
    state = Supervision(world_size, shutdown_timeout_s)
    for rank in range(world_size):
        state.on_started(rank)
    return state


def ended(rank: int, status: int = 0, at: float = 1.0) -> Exit:
    return Exit(rank, 100 + rank, status, at)


def report(rank: int, at: float = 1.0) -> ExceptionReport:
    return ExceptionReport(rank, 100 + rank, at, ("ValueError",), "ValueError: boom", "a.py:1", "Traceback")


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_is_left_as_long_as_one_runs_whoever_ends_and_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    state, gone = Supervision(5, 10.0), set[int]()
    for _ in range(60):
        rank = rng.randrange(5)
        if rank in gone:
            state.abandoned.discard(rank)
            state.on_replaced(rank)
            gone.discard(rank)
        else:
            rng.choice([state.on_abandoned, state.on_retired])(rank)
            gone.add(rank)
        assert state.running == tuple(rank for rank in range(5) if rank not in gone)
        assert [state.is_running(rank) for rank in range(6)] == [rank in state.running for rank in range(6)]
        assert state.has_running == (len(gone) < 5)
        assert state.finished == (len(gone) == 5)


def test_a_job_ends_when_all_its_ranks_have_ended() -> None:
    state = running(2)
    assert state.on_exit(ended(0)) == []
    assert not state.finished
    assert state.on_exit(ended(1)) == []
    assert state.finished
    assert state.failures == []
    assert state.next_due is None


def test_after_a_failure_the_others_get_a_moment_then_sigterm_then_the_grace_period_then_sigkill() -> None:
    state = running()
    assert state.on_exit(ended(1, 3, at=1.0)) == []
    assert state.next_due == 1.0 + REPORT_GRACE_S
    assert state.on_time(1.0) == []
    assert state.on_time(1.2) == [Signal(signal.SIGTERM, (0, 2), group=False)]
    assert state.next_due == 11.2
    state.on_exit(ended(0, -signal.SIGTERM, at=1.3))
    assert state.on_time(11.2) == [Kill()]
    assert state.killed == (2,)
    state.on_exit(ended(2, -signal.SIGKILL, at=11.3))
    assert state.finished
    assert [failure.rank for failure in state.failures] == [1, 0, 2]


def test_a_report_alone_starts_the_end_though_the_process_lingers() -> None:
    state = running()
    assert state.on_report(report(1), 1.0) == []
    # rank 1 is ending by itself: it is left to its clean-up until the grace period is over
    assert state.on_time(1.0 + REPORT_GRACE_S) == [Signal(signal.SIGTERM, (0, 2), group=False)]
    assert state.on_time(state.next_due or 0) == [Kill()]
    assert state.killed == (0, 1, 2)


def test_ctrl_c_goes_to_whole_groups_and_the_second_kills() -> None:
    state = running()
    assert state.on_signal(signal.SIGINT, 5.0) == [Signal(signal.SIGINT, (0, 1, 2), group=True, is_relayed=True)]
    assert state.next_due == 15.0 + SAME_SIGNAL_S  # for so long the signal is held
    assert state.on_signal(signal.SIGINT, 5.1) == [Kill()]
    assert state.on_signal(signal.SIGINT, 5.2) == []
    assert state.interrupted == signal.SIGINT


def test_sigterm_goes_to_the_ranks_alone() -> None:
    assert running().on_signal(signal.SIGTERM, 5.0) == [Signal(signal.SIGTERM, (0, 1, 2), group=False, is_relayed=True)]


def test_a_reader_that_has_gone_stops_the_ranks_with_sigterm() -> None:
    state = running()
    assert state.on_signal(signal.SIGPIPE, 5.0) == [Signal(signal.SIGTERM, (0, 1, 2), group=False)]
    assert state.interrupted == signal.SIGPIPE


def test_ctrl_c_before_any_rank_exists_ends_the_job_at_once() -> None:
    state = Supervision(2, 10.0)
    assert state.on_signal(signal.SIGINT, 0.0) == [Kill()]


def test_ctrl_c_while_a_failed_job_is_being_stopped_kills_at_once() -> None:
    state = running()
    state.on_exit(ended(0, 1))
    state.on_time(1.0 + REPORT_GRACE_S)
    assert state.on_signal(signal.SIGINT, 2.0) == [Kill()]


def test_signals_that_do_not_end_a_job_are_passed_on() -> None:
    state = running(2)
    assert state.on_signal(signal.SIGUSR1, 0.0) == [Signal(signal.SIGUSR1, (0, 1), group=False, is_relayed=True)]
    assert state.on_signal(signal.SIGCONT, 0.0) == [Signal(signal.SIGCONT, (0, 1), group=True)]
    assert state.phase == "running"


def test_time_alone_changes_nothing_in_a_running_job() -> None:
    assert running().on_time(1e9) == []


def test_who_is_still_there_when_others_have_ended_is_told_ever_more_rarely() -> None:
    state = running(3)
    assert state.on_exit(ended(0, at=100.0)) == []
    assert state.next_due == 110.0
    assert state.on_exit(ended(1, at=105.0)) == []
    told = []
    while len(told) < 7:
        now = state.next_due
        assert now is not None
        assert state.on_time(now) == [ReportStragglers(now - 105.0)]
        told.append(now - 105.0)
    assert told == [10.0, 60.0, 600.0, 3600.0, 7200.0, 10800.0, 14400.0]
    assert state.phase == "running"
    assert state.on_exit(ended(2, at=20000.0)) == []
    assert state.next_due is None


def test_ranks_that_outlive_the_first_by_the_exit_timeout_are_stopped() -> None:
    state = Supervision(3, 10.0, exit_timeout_s=30.0)
    for rank in range(3):
        state.on_started(rank)
    state.on_exit(ended(0, at=100.0))
    state.on_exit(ended(1, at=125.0))
    assert state.next_due == 130.0
    assert state.on_time(130.0) == [ReportStragglers(5.0), Signal(signal.SIGTERM, (2,), group=False)]
    assert state.overdue == (2,)
    assert state.next_due == 140.0
    assert state.on_time(140.0) == [Kill()]


def test_a_failure_after_the_first_end_is_a_failure() -> None:
    state = running(2)
    state.on_exit(ended(0, at=100.0))
    state.on_exit(ended(1, 3, at=101.0))
    assert state.finished
    assert [failure.rank for failure in state.failures] == [1]


def test_a_rank_that_asks_to_be_started_again_stops_no_other() -> None:
    state = running(2)
    assert state.on_exit(ended(0, os.EX_TEMPFAIL)) == []
    assert state.phase == "running"
    assert state.on_exit(ended(1)) == []
    assert (state.finished, state.failures) == (True, [])
