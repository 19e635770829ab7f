"""A pump copies lines from a rank's pipe to the viewer and the logs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx._job.output import pump as module
from phalanx._job.output.logs import NO_STREAMS, Logs
from phalanx._job.output.pump import Pump


class Viewer:
    """A viewer that keeps the lines."""

    def __init__(self) -> None:
        self.full = False
        self.lines: list[bytes] = []

    def begin(self, ranks: Sequence[int]) -> None: ...

    def end(self, rank: int) -> None: ...

    def show(self, rank: int, stream: int, lines: Sequence[bytes], status: bytes) -> None:
        self.lines += lines

    def print_once(self, what: str, text: str) -> None: ...

    def flush(self) -> None: ...


def test_a_line_that_is_shown_in_two_parts_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARTIAL_S", 0.0)
    logs = Logs(str(tmp_path), "job", redirects=NO_STREAMS, tee=NO_STREAMS, local_ranks_filter=None)
    logs.begin([0], 0)
    viewer = Viewer()
    pump = Pump(viewer, logs)
    ours, theirs = os.pipe()
    pump.add(0, 1, ours)
    os.write(theirs, b"Loading ... ")
    assert pump.read(ours)
    viewer.full = True  # more may wait in the pipe
    pump.show_due()
    assert (pump.next_due, viewer.lines) == (None, [])
    viewer.full = False
    assert pump.next_due is not None
    pump.show_due()
    assert (pump.next_due, viewer.lines) == (None, [b"Loading ... "])
    os.write(theirs, b"done\nend")
    pump.read(ours)
    os.close(theirs)
    pump.show_due()  # finds the end of the stream
    assert viewer.lines == [b"Loading ... ", b"done", b"end"]
    pump.close()
    assert (tmp_path / "rank_0.log").read_text() == "Loading ... done\nend\n"
