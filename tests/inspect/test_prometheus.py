"""What `phalanx top` shows, in Prometheus's words."""

from phalanx._job.inspect.top.prometheus import as_prometheus
from phalanx._job.inspect.top.view import JobView, LostView, Pace, RankView, SlowestRank, StuckView

RANK = RankView(
    0, 'a"b\\c', 0, 100, "S", Pace("rounds", 7, None, 2.5, 40.0), 0.5, None, None, 0.25, 0.25, 1 << 20, True, "", 1.5
)
JOB = JobView(
    7, "train.py", 2, 60.0, 1, 3, 2, 1, (), (LostView(1, 101, 4.0, "SIGKILL"),), Pace("rounds", 7, 17, 2.5, 40.0),
    SlowestRank(0, "gpu-7", 5, 6, 0.2), StuckView("all_reduce #8", "dp", (0,), (1,), 0, 3.0), 10.0, (RANK,), (),
)  # fmt: skip


def test_steps_waits_losses_and_restarts_are_there_and_what_is_unknown_is_not():
    lines = as_prometheus(JOB).splitlines()
    host = r'host="a\"b\\c"'
    for line in (
        "phalanx_restarts_total 1.0",
        "phalanx_ranks_lost_total 1.0",
        "phalanx_step 7.0",
        "phalanx_left_seconds 4.0",
        "phalanx_stuck_seconds 3.0",
        "phalanx_stuck_ranks_missing 1.0",
        'phalanx_slowest_rank_wait_ratio{rank="0",host="gpu-7"} 0.2',
        f'phalanx_rank_time_ratio{{rank="0",{host},part="waiting"}} 0.25',
        f'phalanx_rank_inside_seconds{{rank="0",{host}}} 1.5',
        "# TYPE phalanx_restarts_total counter",
    ):
        assert line in lines
    assert not any('part="idle"' in line for line in lines)
    assert len({line for line in lines if line.startswith("# TYPE")}) == sum(
        line.startswith("# HELP") for line in lines
    )
