"""A `JobResult` is the result of a job, which the agent writes for the program that has started the job."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class JobResult:
    """A `JobResult` has the rank that failed first (`failed_rank`; -1 if none failed) and a `text` about its failure.

    A `world_size` of 0 means that the job did not begin.
    """

    world_size: int = 0
    failed_rank: int = -1
    text: str = ""

    def write(self, path: str) -> None:
        """Write the result to `path` atomically."""
        draft = f"{path}.draft"
        Path(draft).write_text(json.dumps(asdict(self)))
        os.rename(draft, path)

    @classmethod
    def read(cls, path: str) -> JobResult | None:
        """Return the result in `path`; None if there is no such file."""
        try:
            return cls(**json.loads(Path(path).read_text()))
        except FileNotFoundError:
            return None
