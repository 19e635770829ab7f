"""A rank of an elastic job with a Trainer, which prints, logs and saves at each step, until a file tells it to stop.

FOLDER/over        the training ends after the step at hand
FOLDER/saved-STEP  what rank 0 has saved by torch.save: the step and its process
FOLDER/checkpoints, FOLDER/csv, FOLDER/tensorboard    what the Trainer writes
FOLDER/wait-RANK   the process that was started as RANK waits at its end until the file is gone
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.loggers import CSVLogger
from phalanx.trainer import LambdaCallback

SAVE_EVERY, PRINT_EVERY = 5, 10


def main(folder: Path) -> None:
    started_as = os.environ["RANK"]
    torch.manual_seed(0)
    inputs = torch.randn(96, 8)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))

    def watch(trainer: phalanx.Trainer, loss: Tensor) -> None:
        if trainer.step % PRINT_EVERY == 0:
            sys.stdout.write(f"step {trainer.step} pid {os.getpid()}\n")
        if dist.get_rank() == 0:
            torch.save({"step": trainer.step, "pid": os.getpid()}, folder / f"saved-{trainer.step}.part")
            os.replace(folder / f"saved-{trainer.step}.part", folder / f"saved-{trainer.step}")
            with open(folder / "saves", "a") as file:
                file.write(f"{trainer.step} {os.getpid()}\n")
        over = torch.tensor(float((folder / "over").exists()))
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over.item():
            trainer.stop("told to")

    trainer = phalanx.Trainer(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        F.mse_loss,
        strategy="multi_worker_mirrored",
        max_epochs=10**6,
        callbacks=[LambdaCallback(on_step_end=watch)],
        log_dir=folder / "tensorboard",
        log_every=1,
        logger=CSVLogger(folder / "csv"),
        checkpoint=folder / "checkpoints",
        save_every=SAVE_EVERY,
    )
    trainer.fit(DataLoader(data, 24, shuffle=True))
    sys.stdout.write(f"stopped at {trainer.step} as {dist.get_rank()} of {dist.get_world_size()} pid {os.getpid()}\n")
    while (folder / f"wait-{started_as}").exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
