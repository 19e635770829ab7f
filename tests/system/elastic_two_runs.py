"""A rank of a job whose script calls `elastic.run` twice; rank 1 is lost in the run that STRIKE names."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx
from phalanx import elastic

STEPS = 4


def make(folder: Path, run: str) -> Callable[[], int]:
    model = phalanx.DistributedDataParallel(torch.nn.Linear(2, 1), check=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    struck = folder / "struck"

    def train(state: elastic.State) -> int:
        while state.step < STEPS:
            if (os.environ.get("STRIKE"), state.step, dist.get_rank()) == (run, 2, 1) and not struck.exists():
                struck.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.commit()
        return state.step

    train.__name__ = run
    return elastic.run(elastic.State(model=model, optimizer=optimizer), wait_s=600.0)(train)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with phalanx.init(timeout=60.0):
        print("first", make(folder, "first")())
        print("second", make(folder, "second")())
