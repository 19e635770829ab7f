"""A `Verdict` is what the agent says of a job at its end, to a caller that raises it instead of a user who reads it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Verdict:
    """How a job ended. `failed_rank` is the first cause, -1 without one; `text` are the agent's words for a user."""

    world_size: int = 0
    failed_rank: int = -1
    text: str = ""
    interrupted: int = 0  # the signal that ended it

    def write(self, path: str) -> None:
        """Write it to `path`, whole or not at all."""
        draft = f"{path}.draft"
        Path(draft).write_text(json.dumps(asdict(self)))
        os.rename(draft, path)

    @classmethod
    def read(cls, path: str) -> Verdict | None:
        """Return what was written there; None if nothing was."""
        try:
            return cls(**json.loads(Path(path).read_text()))
        except FileNotFoundError:
            return None
