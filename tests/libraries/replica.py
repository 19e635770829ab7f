"""One replica of a job that torchft keeps alive; `tests/libraries/run.py` starts, kills and restarts it."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.libraries.run import blocks
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

STEPS, KILLED_IN = 8, 3


def main(backend: str, replica: int, attempt: int, folder: str) -> None:
    names: dict[str, Any] = {"ProcessGroupPhalanx": ProcessGroupGloo}
    if backend == "phalanx":
        exec(blocks()["torchft"], names)
    torch.manual_seed(42)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=names["ProcessGroupPhalanx"](timeout=timedelta(seconds=20)),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=str(replica),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        port=0,
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60),
    )
    model = DistributedDataParallel(manager, net)
    optimizer = OptimizerWrapper(manager, torch.optim.Adam(net.parameters(), lr=0.05))
    while (step := manager.current_step()) < STEPS:
        random = torch.Generator().manual_seed(10 * step + replica)
        x, y = torch.rand(4, 3, generator=random), torch.randint(4, (4,), generator=random)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        if (replica, attempt, step) == (1, 0, KILLED_IN):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    torch.save(net.state_dict(), f"{folder}/{replica}")
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads would keep the process


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
