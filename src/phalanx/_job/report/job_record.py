"""A `JobRecord` is the launcher's record of a job, in the file `job.json`.

The file is written when the job begins, so that even a killed command leaves it, and again when the job ends.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx._job.report.measurements import RunEvent

FILE = "job.json"
RANKS = "ranks"  # the subfolder of the report's folder for the ranks' files
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class JobRecord:
    """A `JobRecord` describes a job; times are seconds of CLOCK_MONOTONIC, and `end` is one of `measurements.ENDS`."""

    name: str
    command: str
    begun: float
    begun_unix: float
    world_size: int
    max_restarts: int = 0
    pid: int = 0
    host: str = ""
    ended: float | None = None
    end: str = "running"
    end_text: str = ""
    exit_code: int | None = None
    events: tuple[RunEvent, ...] = ()
    clock_offsets: Mapping[str, float] = field(default_factory=dict)  # host -> seconds that its clock is behind
    copy_bytes_per_s: Mapping[str, float] = field(default_factory=dict)  # by host
    run: str = ""  # the run's id, which is also in the ranks' files
    is_run_unique: bool = False  # whether no other run has the id, because the user did not choose it

    def write(self, folder: str) -> None:
        """Write the record into `folder`, whole or not at all; raise OSError if that fails."""
        path = os.path.join(folder, FILE)
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump(_printable(asdict(self)), file)
        os.replace(f"{path}.part", path)

    @classmethod
    def read(cls, folder: str) -> JobRecord | None:
        """Return the record of `folder`; None if there is none that can be read."""
        try:
            with open(os.path.join(folder, FILE), encoding="utf-8") as file:
                fields: dict[str, Any] = json.load(file)
            return cls(**{**fields, "events": tuple(RunEvent(**event) for event in fields["events"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _printable(value: Any) -> Any:
    r"""Return `value` with text such as `\udcff` for bytes that are not UTF-8, which a page cannot contain."""
    if isinstance(value, str):
        return _SURROGATES.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    if isinstance(value, dict):
        return {_printable(name): _printable(one) for name, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list | tuple) else value
