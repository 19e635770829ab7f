"""Split a rank's stream of bytes into finished lines and the live status that carriage returns redraw."""

from __future__ import annotations

import re

MAX_LINE_BYTES = 1 << 20  # a longer line is shown in pieces, so that memory stays bounded

# Codes that move the cursor or clear: they would reach into other ranks' lines. Colours ("m") stay.
_MOVES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-ln-z]")


class LineSplitter:
    """It splits one stream; the lines are the same however the bytes were cut into reads.

    As on a terminal, text after a carriage return overwrites the line: only the final state of such a line counts, and
    what it shows until its end is `status`. An overwritten line whose final state is blank leaves nothing.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._overwritten = False
        self.status = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completed, in order, without their line ends."""
        *ended, rest = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        lines = []
        for line in ended:
            lines += self._finish(line)
        if b"\r" in rest.rstrip(b"\r"):
            self._overwritten = True
            rest = _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if self._overwritten or rest.endswith(b"\r"):
            state = _MOVES.sub(b"", _last_state(rest))
            self.status = state if state.strip() else b""
        if len(rest) > MAX_LINE_BYTES:
            lines += self._finish(rest)
            rest = b""
        self._rest = rest
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line of a stream that has ended, if it had no line end."""
        rest, self._rest = self._rest, b""
        return self._finish(rest) if rest else []

    def _finish(self, line: bytes) -> list[bytes]:
        overwritten = self._overwritten or b"\r" in line.rstrip(b"\r")
        self._overwritten, self.status = False, b""
        state = _last_state(line) if b"\r" in line else line
        if b"\x1b" in state:
            state = _MOVES.sub(b"", state)
        return [] if overwritten and not state.strip() else [state]


def _last_state(line: bytes) -> bytes:
    """Return what the last carriage return left on the line."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
