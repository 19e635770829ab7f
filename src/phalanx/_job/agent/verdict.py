"""A `Verdict` is the agent's result of a job, for a caller that raises it instead of a user who reads it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Verdict:
    """A `Verdict` describes how a job ended. `failed_rank` is the first cause, or -1; `text` is the agent's report."""

    world_size: int = 0
    failed_rank: int = -1
    text: str = ""
    interrupted: int = 0  # the signal that ended it

    def write(self, path: str) -> None:
        """Write the verdict to `path`, wholly or not at all."""
        draft = f"{path}.draft"
        Path(draft).write_text(json.dumps(asdict(self)))
        os.rename(draft, path)

    @classmethod
    def read(cls, path: str) -> Verdict | None:
        """Return the verdict in `path`; None if there is none."""
        try:
            return cls(**json.loads(Path(path).read_text()))
        except FileNotFoundError:
            return None
