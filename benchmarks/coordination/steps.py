"""What does it cost the steps of an undisturbed job that another host could lead it?

Two hosts (network namespaces) train an elastic job with a rank each. With a witness on a third host, the second one
keeps a copy of the job's store and could lead; without one none does. Each turn is a job of its own, whose steps are
counted once the standby is there; the number is the median of a step, on rank 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is

ALONE, FOLLOWED = "without a standby", "with a standby"
FEATURES, BATCH, ASK_EVERY = 64, 32, 20
STANDS_BY = "without this host, "
PHALANX = [sys.executable, "-m", "phalanx.cli"]


def train(folder: Path, num_steps: int) -> None:
    """Be a rank: train until FOLDER/measure is there, and then so many steps, whose times rank 0 writes down."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import phalanx
    from phalanx import elastic

    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.Adam(model.parameters())
    state = elastic.State(model=model, optimizer=optimizer)
    x = torch.randn(BATCH, FEATURES)

    def step(state: Any) -> float:
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        state.commit()
        return time.perf_counter() - begun

    @elastic.run(state)
    def run(state: Any) -> None:
        is_due = torch.zeros(1)
        while not is_due.item():
            for _ in range(ASK_EVERY):
                step(state)
            if dist.get_rank() == 0:
                is_due.fill_(float((folder / "measure").exists()))
            dist.broadcast(is_due, src=0)
        seconds = [step(state) for _ in range(num_steps)]
        if dist.get_rank() == 0:
            (folder / "seconds").write_text(str(statistics.median(seconds)))

    run(state)
    dist.destroy_process_group()


def run_job(machines: list[Any], num_steps: int, *, is_followed: bool) -> float:
    """Return the seconds of a step of a job of its own."""
    from phalanx._comm.control.key import Key

    environ = {**os.environ, "PHALANX_KEY": str(Key(bytes(32))), "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[str]] = []

    def begin(number: int, *words: str) -> subprocess.Popen[str]:
        line = [*machines[number].command, *PHALANX, *words]
        started.append(subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    with tempfile.TemporaryDirectory() as folder:
        witness = f"{machines[2].address}:29481"
        where = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:29500"]
        own = ["--witness", witness] if is_followed else []
        script = ["--nproc-per-node", "1", str(HERE / "steps.py"), "--rank", folder, "--steps", str(num_steps)]
        try:
            if is_followed:
                begin(2, "coordinator", "--bind", ":29481")
            first = begin(0, "run", *where, *own, *script)
            begin(1, "run", *where, *script)
            assert first.stdout is not None
            while is_followed and STANDS_BY not in (line := first.stdout.readline()):
                assert line, "the job has ended"
            Path(folder, "measure").touch()
            said = first.communicate()[0]
            assert first.returncode == 0, said
            return float(Path(folder, "seconds").read_text())
        finally:
            for process in started:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2000, help="in each turn")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if arguments.rank:
        train(Path(arguments.rank), arguments.steps)
        return
    from phalanx.testing.namespaces import hosts

    with hosts(3) as machines:
        contestants = {
            ALONE: lambda: run_job(machines, arguments.steps, is_followed=False),
            FOLLOWED: lambda: run_job(machines, arguments.steps, is_followed=True),
        }
        found = harness.interleave(contestants, arguments.rounds)
    alone, followed = (harness.summarise(found[which]).median for which in (ALONE, FOLLOWED))
    row = ["a step", harness.format_time(alone), harness.format_time(followed), harness.format_ratio(followed / alone)]
    harness.print_table(["", ALONE, FOLLOWED, "times as long"], [row])
    harness.write_results(arguments.output, {"steps": found}, machine=harness.describe_machine())


if __name__ == "__main__":
    main()
