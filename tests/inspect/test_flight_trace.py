"""The trace is one that viewers open: bars of one thread never overlap, and everything has a name."""

import itertools
import json

from phalanx._comm.diagnostics.flight_recorder import Record
from phalanx._comm.diagnostics.observer import GroupLog, RankLog
from phalanx._job.inspect.flight.files import plan_records, plan_trace, write_flight


def op(seq, enter, leave, kind=3, peer=-1, status=0):
    return Record(seq, kind, 12, 0, -1, peer, 6, (2, 3), enter, leave, status, "train.py:88")


GROUPS = [
    GroupLog("dp", 2, (RankLog(0, 10, True, False, "", (op(1, 1000, 3000), op(2, 4000, 0))),
                       RankLog(1, 11, True, True, "", ()))),
    GroupLog("tp", 2, (RankLog(0, 10, True, False, "", (op(1, 100, 900, kind=10, peer=1),
                                                       op(1, 200, 500, kind=11, peer=1),
                                                       op(2, 600, 700, kind=11, peer=1),
                                                       op(3, 900, 950))),)),
]  # fmt: skip


def bars(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_each_rank_is_a_process_and_each_group_a_thread():
    trace = plan_trace(GROUPS, {10: 9000}, 10_000)
    names = {(e["pid"], e["tid"], e["args"]["name"]) for e in trace["traceEvents"] if "name" in e["args"]}
    assert names == {(10, 0, "rank 0"), (11, 0, "rank 1"), (10, 1, "group dp"), (10, 2, "group tp"),
                     (10, 3, "group tp (2)")}  # fmt: skip


def test_a_bar_says_what_was_called_and_lasts_as_long_as_the_call():
    first, unfinished = bars(plan_trace(GROUPS, {10: 9000}, 10_000))[:2]
    assert (first["name"], first["ts"], first["dur"]) == ("all_reduce #1", 1.0, 2.0)
    assert first["args"] == {
        "seq": 1, "shape": [2, 3], "dtype": "float32", "reduction": "SUM", "site": "train.py:88", "status": "ok",
    }  # fmt: skip
    assert (unfinished["dur"], unfinished["args"]["status"]) == (5.0, "running")
    assert bars(plan_trace(GROUPS, {}, 10_000))[1]["dur"] == 6.0


def test_messages_that_overlap_lie_in_different_threads():
    rows = {}
    for bar in bars(plan_trace(GROUPS, {}, 10_000)):
        rows.setdefault((bar["pid"], bar["tid"]), []).append((bar["ts"], bar["ts"] + bar["dur"]))
    assert len(rows) == 3
    for row in rows.values():
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(row))


def test_records_are_kept_as_plain_data(tmp_path):
    write_flight(str(tmp_path), GROUPS, {10: 9000})
    write_flight(str(tmp_path), GROUPS, {}, attempt=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "flight.json", "flight.trace.json", "flight_attempt_0.json", "flight_attempt_0.trace.json",
    ]  # fmt: skip
    kept = json.loads((tmp_path / "flight.json").read_text())
    expected = plan_records(GROUPS, {10: 9000}, kept["taken_ns"], kept["unix_offset_ns"])
    assert kept == json.loads(json.dumps(expected))
    operation = kept["groups"][0]["ranks"][0]["operations"][1]
    assert (operation["operation"], operation["leave_ns"], operation["status"]) == ("all_reduce", None, "running")
