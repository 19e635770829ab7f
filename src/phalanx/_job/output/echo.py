"""Keep a traceback back that a rank has reported and also prints, so that it is not shown twice."""

from __future__ import annotations

import re

_TAG = re.compile(rb"\[rank\d+\]: $")


class Echo:
    """An echo takes the lines of a rank's stderr, and keeps those equal to `text`, while no other comes between."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._lines = text.rstrip(b"\n").split(b"\n")
        self._tag = b""  # torch.distributed's hook puts it in front of each line
        self._at = 0  # so many lines of the text have come
        self._over = False

    @property
    def over(self) -> bool:
        """Return whether nothing is kept any more: it was released, or came otherwise than it was told."""
        return self._over

    def feed(self, line: bytes) -> list[bytes]:
        """Return the lines to show now that `line` has come."""
        if self._over or self._at == len(self._lines):
            return [line]
        expected = self._lines[self._at]
        if self._at == 0:
            if not line.endswith(expected):
                return [line]
            self._at = 1
            before = line.removesuffix(expected)  # this stood on the line already: a progress bar
            tag = _TAG.search(before)
            if tag is not None:
                self._tag, before = tag.group(), before[: tag.start()]
            return [before] if before.strip() else []
        if line.removeprefix(self._tag) != expected:
            return [*self.release(), line]
        self._at += 1
        return []

    def release(self) -> list[bytes]:
        """Return the lines that were kept; no more will be kept."""
        kept = [] if self._over else [self._tag + line for line in self._lines[: self._at]]
        self._over = True
        return kept
