"""Read the stacks of a process as faulthandler writes them."""

from __future__ import annotations

import os

_WORKER = os.path.join("phalanx", "_job", "agent", "worker.py")


def without_launcher(dump: str) -> str:
    """Return faulthandler's dump without the list of extension modules and without the launcher's own frames."""
    lines = [line for line in dump.splitlines() if not line.startswith("Extension modules: ")]
    ours = [i for i, line in enumerate(lines) if _WORKER in line]
    return "\n".join(line for i, line in enumerate(lines) if not (ours and ours[0] <= i < ours[-1] + 3)).rstrip()
