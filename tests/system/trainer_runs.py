"""Scripts with a Trainer, as they are started."""

import os
import subprocess
import sysconfig
from pathlib import Path

PHALANX = str(Path(sysconfig.get_path("scripts")) / "phalanx")


def run(folder, *words, **variables):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([*map(str, words)], cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
