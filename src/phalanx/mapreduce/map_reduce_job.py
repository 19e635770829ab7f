"""`MapReduceJob` holds the checked arguments of a call, which must agree on all ranks."""

from __future__ import annotations

import codecs
import operator
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.mapreduce.splits import Indexable, names_files

Map = Callable[[Any], Any]
Reduce = Callable[[Any, Iterator[Any]], Any]
Combine = Callable[[Any, Any], Any]

_LEAST_MEMORY = 1 << 20
_BLOCK_BYTES = 64 << 10


class TaskError(PhalanxError):
    """A task failed too often, a function failed, or too many records were bad; all ranks raise the same error."""


@dataclass(frozen=True)
class MapReduceJob:
    """A `MapReduceJob` has the arguments of one call of `map_reduce`, and checks them."""

    inputs: Any
    map: Map
    reduce: Reduce
    combine: Combine | None
    partitions: int
    gather: bool
    output: str | None
    memory_bytes: int
    split_bytes: int | None
    split_records: int | None
    encoding: str | None
    max_bad_records: int | None
    max_attempts: int
    spill_folder: str | None

    def __post_init__(self) -> None:
        for name in ("map", "reduce"):
            if not callable(getattr(self, name)):
                raise TypeError(f"map_reduce: {name} must be a function, got {getattr(self, name)!r:.80}")
        if self.combine is not None and not callable(self.combine):
            raise TypeError(f"map_reduce: combine must be a function of two values or None, got {self.combine!r:.80}")
        for name, least in (
            ("partitions", 1),
            ("memory_bytes", _LEAST_MEMORY),
            ("split_bytes", 1),
            ("split_records", 1),
            ("max_bad_records", 0),
            ("max_attempts", 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("split_bytes", "split_records", "max_bad_records"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"map_reduce: {name} must be an integer, got {value!r:.80}")
            if value < least:
                raise ValueError(f"map_reduce: {name} must be at least {least:,}, got {value:,}")
        if self.encoding is not None:
            require_line_encoding(self.encoding)
        if self.spill_folder is not None and not os.path.isdir(self.spill_folder):
            raise ValueError(f"map_reduce: spill_folder {self.spill_folder!r} is not a folder")

    @property
    def sequence(self) -> Indexable[Any] | None:
        """Return the inputs; None if they are files."""
        return None if names_files(self.inputs) else self.inputs

    @property
    def adds(self) -> bool:
        """Return whether `combine` is `+`, which needs no function call."""
        return self.combine is operator.add

    @property
    def block_bytes(self) -> int:
        """Return the number of bytes to read at once; decoded and split, they take about ten times as much memory."""
        return min(_BLOCK_BYTES, max(4096, self.memory_bytes // 64))

    @property
    def terms(self) -> dict[str, Any]:
        """Return, by argument, what must be the same on every rank."""
        sequence = self.sequence
        same = ("partitions", "gather", "memory_bytes", "split_bytes", "split_records", "encoding", "max_bad_records")
        return {
            "inputs": "files" if sequence is None else f"{len(sequence)} records",
            "combine": "none" if self.combine is None else "a function",
            "output": "none" if self.output is None else "a folder",
            **{name: getattr(self, name) for name in same},
        }


# In these encodings, the byte 0x0A ends every line, occurs nowhere else, and leaves no state for the next line.
_LINE_ENCODINGS = re.compile(
    r"utf-8|ascii|iso8859-\d+|cp125\d|cp437|cp85\d|cp866|koi8-[ru]|mac-roman|"
    r"shift_jis|cp932|euc_jp|euc_kr|cp949|gb2312|gbk|gb18030|big5|cp950"
)


def require_line_encoding(encoding: str) -> None:
    """Refuse an encoding unless its lines are known to end at one byte and can be decoded one by one.

    Raises:
        ValueError: `encoding` is another encoding (UTF-16, EBCDIC, ISO-2022-KR), or unknown to Python.
    """
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        raise ValueError(f"map_reduce: Python has no text encoding {encoding!r}") from None
    if not _LINE_ENCODINGS.fullmatch(name):
        raise ValueError(
            f"map_reduce: lines of {encoding} cannot be found by a byte and decoded one by one, as those of utf-8, "
            "iso8859-*, cp125* and gb18030 can. Use encoding=None and decode in map, or convert the files."
        )
