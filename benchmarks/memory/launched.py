"""How much memory does a training job take as people start it: launcher, ranks and all? Torchrun, and `phalanx run`.

    torchrun, pytorch          DistributedDataParallel and AdamW over Gloo
    phalanx run, pytorch       the same script over our backend
    phalanx run, phalanx-zero  our DistributedDataParallel and ZeroRedundancyOptimizer

Pss of all processes of the job, when all ranks have taken their third step and stand still.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
from contestants import WIDTHS  # noqa: E402 - the line above says where they are
from fleet import pss  # noqa: E402
from harness.jobs import type_lines  # noqa: E402

from phalanx._base.processes import find_descendants  # noqa: E402

SCRIPT = str(HERE / "still.py")
PEER = "torchrun, pytorch"
JOBS = {
    PEER: ("torchrun", "pytorch", "gloo"),
    "phalanx run, pytorch": ("phalanx run", "pytorch", "phalanx"),
    "phalanx run, phalanx-zero": ("phalanx run", "phalanx-zero", "phalanx"),
}
PATIENCE_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", nargs="+", choices=WIDTHS, default=["25"], help="of parameters")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    machine = harness.describe_machine()
    found: dict[str, dict[str, list[float]]] = {}
    for millions in arguments.millions:
        jobs = {name: functools.partial(measure, name, WIDTHS[millions], arguments.ranks) for name in JOBS}
        samples = found[millions] = harness.interleave(jobs, arguments.rounds)
        medians = {name: harness.summarise(values).median for name, values in samples.items()}
        rows = [[name, f"{mb:,.0f} MB", harness.format_ratio(mb / medians[PEER])] for name, mb in medians.items()]
        title = f"{millions} million parameters, {arguments.ranks} ranks, median of {arguments.rounds} rounds"
        harness.print_table(["job", "memory", "of torchrun"], rows, title=title)
    harness.write_results(arguments.output, {"ranks": arguments.ranks, "megabytes": found}, machine=machine)


def measure(name: str, width: int, ranks: int) -> float:
    """Return the MB (10^6 bytes) of all processes of the job, when its ranks stand still."""
    launcher, contestant, backend = JOBS[name]
    (command,) = type_lines(launcher, ranks, [SCRIPT, contestant, backend, str(width)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        try:
            give_up, said = time.monotonic() + PATIENCE_S, b""
            assert job.stdout is not None
            while said.count(b"stands still") < ranks:
                part = os.read(job.stdout.fileno(), 2**16)
                said += part
                if not part or time.monotonic() > give_up:
                    raise SystemExit(f"{' '.join(command)} did not come so far:\n{said.decode()}")
            return sum(pss(pid).total() for pid in (job.pid, *find_descendants(job.pid))) / 1e6
        finally:
            job.send_signal(signal.SIGTERM)
            job.communicate()


if __name__ == "__main__":
    main()
