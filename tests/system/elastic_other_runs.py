"""A rank of a job whose script does not come to the same `elastic.run`s each time, or comes to one twice.

The second argument is what the script does:

leaves out   it leaves out the first run where it finds a file, which the second run writes
goes ahead   it leaves out the first run where it finds a file, which that run writes itself
caught       the first run raises an exception on all ranks, which the script catches
loop         one run three times, with a State and a model of its own each
quiet        as "loop", and no rank is lost
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx
from phalanx import elastic
from phalanx.elastic import earlier_runs

STEPS = 4


def strike(folder: Path, run: str) -> None:
    """Lose rank 1 here, once."""
    struck = folder / "struck"
    if os.environ.get("STRIKE") == run and dist.get_rank() == 1 and not struck.exists():
        struck.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def make(folder: Path, run: str, fails: bool = False) -> Callable[[], int]:
    model = phalanx.DistributedDataParallel(torch.nn.Linear(2, 1), check=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = elastic.State(model=model, optimizer=optimizer)

    def train(state: elastic.State) -> int:
        while state.step < STEPS:
            if state.step == 2:
                (folder / run).touch()
                dist.barrier()
                strike(folder, run)
                if fails:
                    raise ArithmeticError("the loss is infinite")
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.commit()
        return state.step

    train.__qualname__ = run.partition(" ")[0]
    return elastic.run(state, wait_s=600.0)(train)


def main(folder: Path, what: str) -> None:
    with phalanx.init(timeout=60.0):
        if what in ("loop", "quiet"):
            for fold in range(3):
                make(folder, f"train {fold}")()
                print("kept", len(earlier_runs.names_of_runs()))
            return
        if what == "caught":
            try:
                make(folder, "train", fails=True)()
            except ArithmeticError:
                print("caught")
        elif not (folder / {"leaves out": "tune", "goes ahead": "train"}[what]).exists():
            make(folder, "train")()
        make(folder, "tune")()
        print("all done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
