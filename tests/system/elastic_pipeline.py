"""A rank of an elastic job that has a stage of a pipeline: the last one kills itself in step 3.

With a word behind the folder, which is `keep` of `elastic.run`, it waits there to be killed with its host.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx import elastic

STEPS = 6


def make_model() -> nn.Sequential:
    """Return the model, as every rank makes it."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def main() -> None:
    folder, keep = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    waits = folder / "waits"
    with phalanx.init():
        pipe = phalanx.Pipeline(make_model(), micro_batches=4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.AdamW(pipe.parameters())
        state = elastic.State(model=pipe, optimizer=optimizer, losses=[])

        @elastic.run(state, wait_s=600.0, keep=keep)
        def train(state: elastic.State) -> None:
            for _ in state.epochs(1):
                while state.step < STEPS:
                    if state.step == 3 and dist.get_rank() == 1 and not waits.exists():
                        if keep is None:
                            os.kill(os.getpid(), signal.SIGKILL)
                        waits.touch()
                        signal.pause()
                    optimizer.zero_grad()
                    loss = pipe.step(torch.ones(8, 8), target=torch.ones(8, 8))
                    optimizer.step()
                    state.losses.append(loss.item())
                    state.commit()

        train(state)
        if dist.get_rank() == 0:
            (folder / "losses").write_text(" ".join(map(str, state.losses)))


if __name__ == "__main__":
    main()
