"""What the blocks of a document print when a reader types them, and what they warn of."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HOOK = Path(__file__).parent / "hook"


@dataclass(frozen=True)
class Typed:
    """What a command printed, its exit code, and the warnings of Python and of Phalanx in all its processes."""

    output: str
    code: int
    warnings: list[str]

    def unshown(self, matches: list[str]) -> list[str]:
        """Return the warnings that none of these lines of the output contains."""
        return [warning for warning in self.warnings if not any(warning in line for line in matches)]


def run(command: list[str], folder: Path, **environment: str) -> Typed:
    """Run a command in this folder as a reader would, with the environment of these tests in its PATH."""
    record = folder / ".warnings"
    record.write_text("", encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_", "LOCAL_"))}
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    hooked = {"PYTHONPATH": os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        command,
        cwd=folder,
        env={
            **kept,
            **hooked,
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            "WARNINGS_OF_THE_PAGE": str(record),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    warnings = record.read_text(encoding="utf-8").splitlines()
    record.unlink()
    return Typed(done.stdout + done.stderr, done.returncode, warnings)
