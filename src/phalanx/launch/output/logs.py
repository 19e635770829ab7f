"""The ranks' log files: a disk that is full costs lines, not the job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import FileIO

from phalanx.launch.output.text import encode


class LogFile:
    """A file of lines. Once one could not be written, the next that can says so in the file; no line is torn."""

    def __init__(self, path: str) -> None:
        self.path = path
        # unbuffered: what a rank said last must be on disk when everything dies
        self._file = FileIO(path, "w")
        self.problem: OSError | None = None  # the latest
        self._gap = False

    def put(self, lines: Sequence[bytes]) -> None:
        """Write `lines`, or as many as there is room for."""
        self._write(b"\n".join(lines) + b"\n")

    def close(self) -> None:
        """Close the file; what some file systems tell only now is a problem, too."""
        try:
            self._file.close()
        except OSError as error:
            self.problem = error

    def _write(self, data: bytes) -> None:
        if self._gap:
            data = explain_gap(self.problem) + data
        try:
            while data:
                written = self._file.write(data) or 0
                data = data[written:]
                self._gap = False
        except OSError as error:
            self.problem = error
            self._gap = True


def explain_gap(problem: OSError | None) -> bytes:
    """What stands in place of lines that could not be written; it ends the line that was torn, if one was."""
    why = (problem.strerror if problem is not None else None) or os.strerror(0)
    return encode(f"\n[phalanx run: lines are missing here: {why}]\n")
