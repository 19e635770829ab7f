"""A rank of a job that trains a model in an `elastic.run`, and its body with a new head in a second one.

STRIKE    RUN STEP RANK, several with commas: that rank is lost there, once; "between" for RUN: between the two
HOSTS     a rank that is to be lost waits there to be killed with its host
UNPICKLED the first run returns a function
"""

import copy
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx import elastic

STEPS = 5


def strike(folder: Path, run: str, step: int) -> None:
    """Lose this rank, if it is to be lost here, and none was before."""
    here = f"{run} {step} {dist.get_rank()}"
    struck = folder / f"struck {here}"
    if here in os.environ.get("STRIKE", "").split(",") and not struck.exists():
        struck.touch()
        sys.stdout.write(f"rank {dist.get_rank()} is lost here\n")
        sys.stdout.flush()
        while os.environ.get("HOSTS"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    log = open(folder / f"steps-{os.getpid()}", "a", buffering=1)  # noqa: SIM115  # to the end

    def steps(state: elastic.State, run: str, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of) -> float:  # type: ignore[no-untyped-def]
        last = 0.0
        while state.step < STEPS:
            torch.manual_seed(1000 * state.step + dist.get_rank())  # a batch of each rank's own
            x = torch.randn(8, 6)
            strike(folder, run, state.step)
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            last = loss.item()
            state.commit()
            log.write(f"{run} {state.step} {dist.get_rank()}\n")
        return last

    with phalanx.init(timeout=60.0):
        torch.manual_seed(1)
        body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh())

        def pretrain() -> None:
            first = phalanx.DistributedDataParallel(nn.Sequential(body, nn.Linear(8, 1)), check=False)
            optimizer = torch.optim.AdamW(first.parameters())
            state = elastic.State(model=first, optimizer=optimizer, best=1.0)

            @elastic.run(state, wait_s=600.0)
            def train(state: elastic.State) -> dict[str, object]:
                state.best = steps(state, "first", first, optimizer, lambda model, x: model(x).pow(2).mean())
                kept = (lambda: None) if os.environ.get("UNPICKLED") else None
                return {"best": state.best, "model": first, "rank": dist.get_rank(), "kept": kept}

            told = train(state)
            assert told["model"] is first
            assert told["rank"] == dist.get_rank()
            assert told["best"] == state.best
            (folder / f"best-{dist.get_rank()}").write_text(repr(told["best"]))

        pretrain()  # nothing but the body is left of it
        strike(folder, "between", 0)
        reference = copy.deepcopy(body).eval()  # as the first run has left it, and in no State
        head = nn.Linear(8, 2)
        second = phalanx.DistributedDataParallel(nn.Sequential(body, head), check=False)
        descent = torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9)
        later = elastic.State(model=second, optimizer=descent)

        def distance(model: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                aim = reference(x)[:, :2]
            return (model(x) - aim).pow(2).mean()

        @elastic.run(later, wait_s=600.0)
        def tune(state: elastic.State) -> float:
            return steps(state, "second", second, descent, distance)

        tune(later)
        everything = {"body": reference.state_dict(), "tuned": second.state_dict(), "optimizer": descent.state_dict()}
        torch.save(everything, folder / f"end-{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
