"""The examples, alone and under the launcher."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


SCRIPTS = Path(sysconfig.get_path("scripts"))


ALONE = [sys.executable]


PHALANX_RUN = [str(SCRIPTS / "phalanx"), "run", "--nproc-per-node", "2"]


def run(folder, launcher, script, *arguments):
    done = subprocess.run(
        [*launcher, str(EXAMPLES / script), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
