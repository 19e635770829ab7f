"""A rank of an elastic job that trains, on its script's words: it stops at some steps until it is told to go on.

FOLDER/go-STEP         the ranks that have come to STEP go on
FOLDER/left-G-RANK     RANK of generation G has left the training function by an error
FOLDER/open-G-RANK     how many descriptors it had open as it began to train there
FOLDER/samples-PID     generation, step, rank and samples of each step
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx import elastic

BATCH, SAMPLES, EPOCHS = 3, 96, 2
LR, MOMENTUM = 0.05, 0.9
STOPS = (3, 6)
OPERATION_S = float(os.environ.get("OPERATION_S", "3"))  # from the first step on; ranks may come together later


class Numbers(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """Sample i says that it is i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor]:
        return i, torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor([float(i % 5)])


def build() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def main(folder: Path) -> None:
    dist.init_process_group("phalanx", timeout=timedelta(seconds=120))
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    ddp = phalanx.DistributedDataParallel(model)
    data = Numbers()
    sampler = phalanx.DistributedSampler(data, shuffle=True, seed=3)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
    state = elastic.State(model=ddp, optimizer=optimizer, sampler=sampler)
    dist.group.WORLD.set_timeout(timedelta(seconds=OPERATION_S))  # type: ignore[union-attr]  # ours has it
    log = open(folder / f"samples-{os.getpid()}", "a")  # noqa: SIM115  # to the end

    @elastic.run(state, wait_s=600.0)
    def train(state: elastic.State) -> None:
        generation, rank = os.environ.get("PHALANX_GENERATION", "0"), dist.get_rank()
        (folder / f"open-{generation}-{rank}").write_text(str(len(os.listdir("/proc/self/fd"))))
        try:
            for epoch in state.epochs(EPOCHS):
                for samples, x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(ddp(x), y).backward()
                    optimizer.step()
                    log.write(f"{generation} {state.step} {epoch} {' '.join(map(str, samples.tolist()))}\n")
                    log.flush()
                    state.commit()
                    if state.step in STOPS:
                        sys.stdout.write(f"rank {rank} is at step {state.step}, pid {os.getpid()}\n")
                        while not (folder / f"go-{state.step}").exists():
                            time.sleep(0.01)
        except BaseException:
            (folder / f"left-{generation}-{rank}").touch()
            raise

    train(state)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex()
    (folder / f"weights-{dist.get_rank()}").write_text(weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
