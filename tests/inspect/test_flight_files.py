"""The records of a job's ranks, as a file has them."""

import json

from phalanx._comm.diagnostics.flight_recorder import Record
from phalanx._comm.diagnostics.observer import GroupLog, RankLog
from phalanx._job.inspect.flight.files import plan_records, write_flight


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


def test_records_are_kept_as_plain_data(tmp_path):
    write_flight(str(tmp_path), GROUPS, {10: 9000})
    write_flight(str(tmp_path), GROUPS, {}, attempt=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flight.json", "flight_attempt_0.json"]
    kept = json.loads((tmp_path / "flight.json").read_text())
    expected = plan_records(GROUPS, {10: 9000}, kept["taken_ns"], kept["unix_offset_ns"])
    assert kept == json.loads(json.dumps(expected))
    operation = kept["groups"][0]["ranks"][0]["operations"][1]
    assert (operation["operation"], operation["leave_ns"], operation["status"]) == ("all_reduce", None, "running")
