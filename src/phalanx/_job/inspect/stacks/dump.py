"""Read the stacks of a process as faulthandler writes them."""

from __future__ import annotations

import os


def without_launcher(dump: str) -> str:
    """Return faulthandler's dump without the frames below the script, which are ours and always last."""
    lines = dump.rstrip().splitlines()
    ours = [i for i, line in enumerate(lines) if os.path.join("phalanx", "agent", "worker.py") in line]
    return "\n".join(line for i, line in enumerate(lines) if not (ours and ours[0] <= i < ours[-1] + 3))
