"""`Counters` counts the records, pairs and bytes of a job, and lists its first bad records."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, fields
from typing import Any

from phalanx.errors import summary_of

_SHOWN = 5
_TEXT = 200


@dataclass(frozen=True)
class BadRecord:
    """A `BadRecord` is a record that could not be decoded or for which the map function raised.

    The result ignores it.
    """

    where: str
    record: str
    error: str
    traceback: str = ""

    @classmethod
    def of(cls, where: str, record: Any, error: BaseException) -> BadRecord:
        """Describe the record for which `error` was raised."""
        shown = repr(record[: _TEXT + 1] if isinstance(record, str | bytes) else record)  # a line may be very long
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/phalanx/mapreduce/" not in frame.filename.replace("\\", "/")]
        return cls(
            where,
            shown if len(shown) <= _TEXT else f"{shown[:_TEXT]}…",
            summary_of(error)[: 2 * _TEXT],
            "".join(traceback.format_list(own)),
        )

    def __str__(self) -> str:
        return f"{self.where}: {self.record}: {self.error}"


@dataclass
class Counters:
    """`Counters` are sums over all tasks; a task counts once, however often it ran. `bad_records` has the first few."""

    records: int = 0
    num_bad_records: int = 0
    bytes_read: int = 0
    pairs: int = 0
    combined_pairs: int = 0
    bucket_bytes: int = 0
    bad_records: list[BadRecord] = field(default_factory=list)

    def add(self, other: Counters) -> None:
        """Add the counts of `other`."""
        for one in fields(self):
            if one.name != "bad_records":
                setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        self.bad_records = [*self.bad_records, *other.bad_records][:_SHOWN]

    def count_bad(self, where: str, record: Any, error: BaseException) -> None:
        """Count one more bad record."""
        self.num_bad_records += 1
        if len(self.bad_records) < _SHOWN:
            self.bad_records.append(BadRecord.of(where, record, error))

    def describe_bad(self) -> str:
        """Describe how many records are bad, and the first of them."""
        lines = [f"{self.num_bad_records:,} of {self.records:,} records were bad:", *map(str, self.bad_records)]
        if self.num_bad_records > len(self.bad_records):
            lines.append(f"and {self.num_bad_records - len(self.bad_records):,} more")
        return "\n  ".join(lines)
