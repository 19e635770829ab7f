"""Buffer the tracebacks that ranks have reported, because the command may print the failure itself.

In that case the command prints the first failure, and one line for each other rank. Otherwise (Ctrl-C, a lost zygote)
the buffered tracebacks are shown. Of tracebacks that differ only in numbers, only the first is shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx._job.output.standard import encode

# A separate number: not a line number in code (train.py:88), nor a part of a name (float32).
_NUMBER = re.compile(rb"0x[0-9a-fA-F]+|(?<![\w.])(?<!\.py:)\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
_PLACE = re.compile(rb'\s*File ".*", line \d+')


def without_numbers(text: bytes) -> bytes:
    """Return `text` with every number replaced by 0, except line numbers of code, to compare texts."""
    return b"\n".join(line if _PLACE.match(line) else _NUMBER.sub(b"0", line) for line in text.split(b"\n"))


class TracebackBuffer:
    """A `TracebackBuffer` filters the ranks' stderr, and buffers the tracebacks that they have reported."""

    def __init__(self) -> None:
        self._echoes: dict[int, Echo] = {}
        self._forms: dict[int, bytes] = {}  # rank -> its traceback without numbers
        self._quiet: set[int] = set()
        self._shown: dict[bytes, int] = {}  # traceback without numbers -> the rank whose traceback was shown
        self._named: set[int] = set()  # ranks for which a line reports the same traceback as another rank's

    def expect(self, rank: int, traceback: str, *, quiet: bool = False) -> None:
        """Buffer `traceback`, which `rank` is about to print, until `release`; if `quiet`, never show it."""
        if rank not in self._echoes or rank in self._quiet:
            text = encode(traceback)
            self._echoes[rank], self._forms[rank] = Echo(text), without_numbers(text)
            self._quiet.discard(rank)
            if quiet:
                self._quiet.add(rank)

    def has_same(self, traceback: str) -> bool:
        """Return whether another rank has reported this traceback, perhaps with other numbers."""
        return without_numbers(encode(traceback)) in self._forms.values()

    def hide(self, rank: int) -> None:
        """Never show the traceback of `rank`, because it was reported; a replacement may still print another one."""
        self._quiet.add(rank)

    def feed(self, rank: int, lines: Sequence[bytes]) -> Sequence[bytes]:
        """Return those of the new `lines` to show now, and buffered lines that are released."""
        echo = self._echoes.get(rank)
        return lines if echo is None else [shown for line in lines for shown in echo.feed(line)]

    def release(self) -> list[tuple[int, bytes]]:
        """Return the ranks and lines to show: the first of similar tracebacks, and one line for each other rank."""
        released = []
        for rank in sorted(self._echoes):
            form = self._forms[rank]
            if rank in self._quiet or rank in self._named or self._echoes[rank].over:
                continue
            like = self._shown.setdefault(form, rank)
            if like == rank:
                released += [(rank, line) for line in self._echoes.pop(rank).release()]
            else:
                self._named.add(rank)
                released.append((rank, encode(f"the same traceback as rank {like}'s, perhaps with other numbers")))
        return released

    def forget(self) -> None:
        """Drop the buffered lines, because they were reported."""
        self._echoes.clear()
        self._forms.clear()
        self._quiet.clear()
        self._shown.clear()
        self._named.clear()


_TAG = re.compile(rb"\[rank\d+\]: $")


class Echo:
    """An `Echo` filters the lines of a rank's stderr, and buffers lines of `text` until a different line arrives."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._lines = text.rstrip(b"\n").split(b"\n")
        self._tag = b""  # torch.distributed's hook prefixes each line with it
        self._at = 0  # the number of lines of the text that have arrived
        self._over = False

    @property
    def over(self) -> bool:
        """Return whether buffering has ended: the lines were released, or differed from `text`."""
        return self._over

    def feed(self, line: bytes) -> list[bytes]:
        """Return the lines to show now that `line` has arrived."""
        if self._over or self._at == len(self._lines):
            return [line]
        expected = self._lines[self._at]
        if self._at == 0:
            if not line.endswith(expected):
                return [line]
            self._at = 1
            before = line.removesuffix(expected)  # earlier text on this line, such as a progress bar
            tag = _TAG.search(before)
            if tag is not None:
                self._tag, before = tag.group(), before[: tag.start()]
            return [before] if before.strip() else []
        if line.removeprefix(self._tag) != expected:
            return [*self.release(), line]
        self._at += 1
        return []

    def release(self) -> list[bytes]:
        """Return the buffered lines, and end buffering."""
        kept = [] if self._over else [self._tag + line for line in self._lines[: self._at]]
        self._over = True
        return kept
