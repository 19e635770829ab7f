"""What the flight recorders hold is summarised where a rank waited, in a line per difference."""

import json
from dataclasses import replace

from phalanx._comm.diagnostics.flight_recorder import Record
from phalanx._comm.diagnostics.observer import GroupLog, RankLog
from phalanx._job.inspect.flight import describe_flight, plan_records, write_flight

S = 1_000_000_000


def op(seq, enter_s, leave_s=0.0, status=0, kind=3, peer=-1):
    return Record(seq, kind, 12, 0, -1, peer, 4, (4,), int(enter_s * S), int(leave_s * S), status, "train.py:88")


def log(rank, *records, came=True, left=False):
    return RankLog(rank, 100 + rank, came, left, "", tuple(records))


def group(*ranks, name="dp"):
    return GroupLog(name, len(ranks), ranks)


def test_who_waited_and_who_did_not_come_is_told():
    text = describe_flight(
        [group(log(0, op(1, 1, 2), op(2, 2)), log(1, op(1, 1, 2)), log(2, op(1, 1, 2), op(2, 3)))],
        {100: 5 * S, 102: 5 * S},
    )
    assert text.splitlines() == [
        "Last in group 'dp' (flight recorder):",
        "  ranks 0, 2 were in all_reduce #2 (train.py:88) for 3.0 s",
        "  rank 1 last finished all_reduce #1 (train.py:88)",
    ]


def test_the_operation_in_which_the_group_ended_counts_not_the_calls_after_it():
    waited = op(2, 2, 2.5, status=2)
    text = describe_flight([group(log(0, waited, op(3, 3, 3, status=2)), log(1, op(1, 1, 2), left=True))], {})
    assert "rank 0 waited in all_reduce #2 (train.py:88) for 0.5 s, until a rank was lost" in text
    assert "rank 1 last finished all_reduce #1 (train.py:88), and left" in text


def test_a_file_name_with_a_new_line_forges_no_line_of_the_summary():
    sneaky = replace(op(2, 2), call_site="train\n  rank 1 never came\x1b[2J.py:88")
    text = describe_flight([group(log(0, sneaky), log(1, op(1, 1, 2)))], {100: 5 * S})
    assert text.splitlines()[1:] == [
        "  rank 0 was in all_reduce #2 (train\\n  rank 1 never came\\x1b[2J.py:88) for 3.0 s",
        "  rank 1 last finished all_reduce #1 (train.py:88)",
    ]


def test_nothing_is_told_where_nobody_waited():
    assert describe_flight([], {}) == ""
    assert describe_flight([group(log(0, op(1, 1, 2)), log(1))], {}) == ""


def test_ranks_that_never_called_or_never_came_are_told_apart():
    text = describe_flight([group(log(0, op(1, 1)), log(1), log(2, came=False))], {100: 2 * S})
    assert "rank 1 had called nothing yet" in text
    assert "rank 2 never came" in text


def test_a_short_wait_is_not_worth_telling_when_the_user_ended_the_job():
    groups = [group(log(0, op(1, 1)), log(1))]
    assert describe_flight(groups, {100: 2 * S}, waited_s=5.0) == ""
    assert "for 9.0 s" in describe_flight(groups, {100: 10 * S}, waited_s=5.0)


def test_many_groups_and_many_different_ranks_are_cut():
    ranks = [log(r, op(r + 1, 1)) for r in range(30)]
    text = describe_flight([group(*ranks, name=str(n)) for n in range(6)], {})
    assert "… and 18 more lines; --log-dir keeps all" in text
    assert text.endswith("… and 2 more groups in which ranks were waiting.")
    assert len(text.splitlines()) == 4 * 14 + 1


# The records of a job's ranks, as a file has them.


def record(seq, enter, leave, kind=3, peer=-1, status=0):
    return Record(seq, kind, 12, 0, -1, peer, 6, (2, 3), enter, leave, status, "train.py:88")


GROUPS = [
    GroupLog("dp", 2, (RankLog(0, 10, True, False, "", (record(1, 1000, 3000), record(2, 4000, 0))),
                       RankLog(1, 11, True, True, "", ()))),
    GroupLog("tp", 2, (RankLog(0, 10, True, False, "", (record(1, 100, 900, kind=10, peer=1),
                                                       record(1, 200, 500, kind=11, peer=1),
                                                       record(2, 600, 700, kind=11, peer=1),
                                                       record(3, 900, 950))),)),
]  # fmt: skip


def test_records_are_kept_as_plain_data(tmp_path):
    write_flight(str(tmp_path), GROUPS, {10: 9000})
    write_flight(str(tmp_path), GROUPS, {}, attempt=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flight.json", "flight_attempt_0.json"]
    kept = json.loads((tmp_path / "flight.json").read_text())
    expected = plan_records(GROUPS, {10: 9000}, kept["taken_ns"], kept["unix_offset_ns"])
    assert kept == json.loads(json.dumps(expected))
    operation = kept["groups"][0]["ranks"][0]["operations"][1]
    assert (operation["operation"], operation["leave_ns"], operation["status"]) == ("all_reduce", None, "running")
