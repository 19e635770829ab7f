"""A rank of an elastic job that has a stage of a pipeline: the last one kills itself in step 3."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx import elastic


def main() -> None:
    with phalanx.init():
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        pipe = phalanx.Pipeline(model, micro_batches=4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.AdamW(pipe.parameters())
        state = elastic.State(model=pipe, optimizer=optimizer)

        @elastic.run(state, wait_s=600.0)
        def train(state: elastic.State) -> None:
            for _ in state.epochs(1):
                for step in range(6):
                    if step == 3 and dist.get_rank() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.zero_grad()
                    pipe.step(torch.ones(8, 8), target=torch.ones(8, 8))
                    optimizer.step()
                    state.commit()

        train(state)


if __name__ == "__main__":
    main()
