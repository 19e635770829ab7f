"""A rank of a long elastic job, which lives through many losses; what it leaves tells whether they cost anything.

FOLDER/board            numbers in shared memory, of 8 bytes: how far the ranks may go, then how far each rank is
FOLDER/samples-PID      generation, step, epoch and samples of each step
FOLDER/held-PID         each time it begins to train: generation, descriptors, threads, resident bytes
FOLDER/result-RANK      what it ends with: weights, random state
"""

import json
import mmap
import os
import random
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.elastic.jobs import Job, Numbers, build
from torch.utils.data import DataLoader

import phalanx
from phalanx import elastic

SAMPLES, BATCH, RANKS = 120, 2, 3
STEPS_OF_EPOCH = SAMPLES // (BATCH * RANKS)
GATE_EVERY_S = 0.002


def train_job(folder: Path, epochs: int, options: dict[str, Any]) -> None:
    job = Job(str(folder), **options)
    with open(folder / "board", "r+b") as file:
        board = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    torch.set_num_threads(1)
    with phalanx.init(timeout=timedelta(seconds=300)):
        ddp, optimizer, _ = build(job)
        data = Numbers(SAMPLES)
        sampler = phalanx.DistributedSampler(data, seed=3)
        loader: Any = DataLoader(
            data,
            batch_size=BATCH,
            sampler=sampler,
            num_workers=job.workers,
            persistent_workers=job.persistent and job.workers > 0,
        )
        state = elastic.State(model=ddp, optimizer=optimizer, sampler=sampler, committed=0)
        log = open(folder / f"samples-{os.getpid()}", "a", buffering=1)  # noqa: SIM115  # to the end
        held = open(folder / f"held-{os.getpid()}", "a", buffering=1)  # noqa: SIM115

        @elastic.run(state, wait_s=600.0)
        def train(state: Any) -> None:
            generation, rank = os.environ.get("PHALANX_GENERATION", "0"), dist.get_rank()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            fds = len(os.listdir("/proc/self/fd"))
            held.write(f"{generation} {fds} {threading.active_count()} {pages * mmap.PAGESIZE}\n")
            for epoch in state.epochs(epochs):
                for ids, x, y in loader:
                    while state.step >= board[0]:
                        time.sleep(GATE_EVERY_S)
                    log.write(f"{generation} {state.step} {epoch} {','.join(map(str, ids.tolist()))}\n")
                    loss = (ddp(x).squeeze(1) - y).pow(2).mean()
                    (loss * (1.0 + 0.01 * random.random())).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    state.committed += 1
                    state.commit()
                    board[1 + rank] = state.step

        train(state)
        assert state.committed == state.step == epochs * STEPS_OF_EPOCH
        result = {
            "weights": {key: value.tolist() for key, value in ddp.state_dict().items()},
            "random": torch.get_rng_state().tolist(),
            "python": repr(random.getstate()),
        }
        (folder / f"result-{dist.get_rank()}").write_text(json.dumps(result))


if __name__ == "__main__":
    train_job(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
