"""Trainers of an elastic job and the servers of their parameters, which are workers outside of the job.

elastic_servers.py FOLDER ADDRESS              a trainer; that of rank 0 stands at step 7 until its host is lost
elastic_servers.py FOLDER ADDRESS NUMBER       a server, until FOLDER/over is there
elastic_servers.py FOLDER ADDRESS store        keeps the store in which all workers meet
"""

import functools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx
from phalanx import rpc

STEPS = 20
SERVERS = ["s0", "s1", "s2"]


def meet(name: str, rank: int, address: str) -> None:
    rpc.init_rpc(name, rank=rank, rpc_backend_options=rpc.RpcBackendOptions(init_method=f"tcp://{address}"))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def train_on(folder: Path, address: str) -> None:
    with phalanx.init(timeout=60.0) as job:
        meet(f"t{job.rank}", 1 + job.rank, address)

        @phalanx.elastic.run(phalanx.elastic.State(job=0), wait_s=600.0)
        def train(state: phalanx.elastic.State) -> dict[str, object]:
            server = phalanx.ParameterServer(
                SERVERS, ["t0", "t1", "t2"], dense={"d": torch.zeros(3)}, tables={"t": torch.zeros(7, 2)},
                optimizer=functools.partial(torch.optim.SGD, lr=1.0), reduction="sum",
            )  # fmt: skip
            print("goes on at step", server.step, "of generation", os.environ.get("PHALANX_GENERATION", "0"))
            ids = torch.tensor([0, 1, 2, 5 - job.rank])
            while server.step < STEPS:
                server.pull({"t": ids})
                if (job.rank, server.step) == (0, 7) and not (folder / "struck").exists():
                    (folder / "struck").touch()
                    while True:
                        time.sleep(0.01)
                server.push_gradients({"d": torch.ones(3)}, {"t": (ids, torch.ones(4, 2))})
            dist.barrier()  # all is pushed
            found = server.state_dict()
            dist.barrier()  # all have looked
            return found

        found = train()
        rows = found["tables"]["t"][:, 0].tolist()  # type: ignore[index]
        print("dense", found["dense"]["d"].tolist(), "rows", rows, "step", found["step"])  # type: ignore[index]
        rpc.shutdown(graceful=False)


def main(folder: Path, address: str, *words: str) -> None:
    if not words:
        train_on(folder, address)
    elif words[0] == "store":
        host, port = address.split(":")
        store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
        (folder / "there").touch()
        wait_for(folder / "over")
        del store
    else:
        meet(f"s{words[0]}", 10 + int(words[0]), address)
        (folder / f"serves-{words[0]}").touch()
        wait_for(folder / "over")
        rpc.shutdown(graceful=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
