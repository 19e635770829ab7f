"""How long a recovery takes with a gigabyte of state, and where the zygote is killed together with the rank."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import run

GIB = 1 << 30
KILLS = 3
# The kill comes after the job's first hundred steps. Each of those copies the state, to take a step back with, and the
# step that is measured would be one of them.
run.STEADY_STEPS = 120
_COPY = """
import time, torch
torch.set_num_threads(1)
source = torch.ones(1 << 28)
source.clone()
start = time.perf_counter()
copied = torch.empty_like(source).copy_(source)
print(time.perf_counter() - start)
"""


def kill_with_zygote(job: run.Job) -> run.Recovery:
    """Kill the parent of rank 1 and then rank 1, and return what `kill_one` returns."""
    kill = os.kill

    def kill_both(pid: int, number: int) -> None:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        kill(parent, number)
        kill(pid, number)

    run.os.kill = kill_both
    try:
        return job.kill_one(replaces_all=False)
    finally:
        run.os.kill = kill


def measure(more_bytes: int, *, with_zygote: bool) -> list[float]:
    found = []
    for _ in range(KILLS):
        with tempfile.TemporaryDirectory() as folder:
            command = [*run.PHALANX, run.SCRIPT, "elastic", folder, str(more_bytes)]
            with run.running([(command, {})], Path(folder)) as job:
                recovery = kill_with_zygote(job) if with_zygote else job.kill_one(replaces_all=False)
                found.append(recovery.seconds)
    return found


def main() -> None:
    copies = [float(subprocess.check_output([sys.executable, "-c", _COPY])) for _ in range(KILLS)]
    print(f"memcpy of 1 GiB into new memory: {median(copies):.2f} s")
    print(f"a rank, 1 GiB of state: {median(measure(GIB, with_zygote=False)):.2f} s")
    print(f"a rank and its zygote: {median(measure(0, with_zygote=True)):.2f} s")
    print(f"a rank: {median(measure(0, with_zygote=False)):.2f} s")


if __name__ == "__main__":
    main()
