"""A rank ends itself by SIGKILL in the middle of training; the weights are those of one process, to the last bit.

Each rank has the same batch, so that gradients are averages of equal numbers: one process has the same bits.
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
from torch import nn

import phalanx

mark = Path(tempfile.gettempdir()) / f"phalanx-program-{os.environ['TORCHELASTIC_RUN_ID']}"
job = phalanx.init()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def step(model, optimizer, number):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


model = phalanx.DistributedDataParallel(make_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = phalanx.elastic.State(model=model, optimizer=optimizer, done=0)


@phalanx.elastic.run(state)
def train(state):
    while state.done < 12:
        if state.done == 5 and job.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, state.done)
        state.done += 1
        state.commit()


train(state)
alone = make_model()
optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
for number in range(12):
    step(alone, optimizer, number)
torch.testing.assert_close(model.module.state_dict(), alone.state_dict(), rtol=0, atol=0)
if job.world_size > 1:
    assert mark.exists(), "no rank was killed"
torch.distributed.barrier()
if job.is_main:
    mark.unlink(missing_ok=True)
print("right")
