"""A rank of a job in which two functions, one after the other, train one State; a checkpoint is saved in between.

The first ends in the middle of an epoch, and freezes a module; the second leaves it so. STRIKE is as in
`elastic_two_runs.py`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.system.elastic_two_runs import strike
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import elastic

FIRST = 3  # the steps of the first run; an epoch has 5, and all of it two epochs more


def main(folder: Path) -> None:
    with phalanx.init(timeout=60.0):
        rank = dist.get_rank()
        log = open(folder / f"steps-{rank}-{elastic_number()}", "a", buffering=1)  # noqa: SIM115  # to the end
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 1))
        torch.manual_seed(10 + rank)
        model = phalanx.DistributedDataParallel(net, check=False)
        optimizer = torch.optim.AdamW(model.parameters())
        aside = nn.Linear(2, 2)
        data = TensorDataset(torch.arange(20), torch.randn(20, 6, generator=torch.Generator().manual_seed(2)))
        sampler = phalanx.DistributedSampler(data)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        state = elastic.State(model=model, optimizer=optimizer, sampler=sampler, aside=aside)
        manager = phalanx.CheckpointManager(folder / "checkpoints", keep=None)
        parts = {"model": model, "optimizer": optimizer}

        def do_step(run: str, numbers: torch.Tensor, x: torch.Tensor) -> None:
            strike(folder, run, state.step)
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
            state.commit()
            log.write(f"{run} {state.step} {rank} {numbers.tolist()}\n")

        @elastic.run(state, wait_s=600.0)
        def first(state: elastic.State) -> None:
            net[1].eval()
            for _ in state.epochs(1):
                for numbers, x in loader:
                    do_step("first", numbers, x)
                    if state.step == FIRST:
                        aside.eval().requires_grad_(False)
                        return

        first(state)
        manager.save(state.step, parts)
        (folder / f"between-{elastic_number()}-{rank}").write_text(f"{manager.latest()}")
        modes = [layer.training for layer in (*model.modules(), aside)]
        trains = [p.requires_grad for p in aside.parameters()]
        (folder / f"modes-{elastic_number()}-{rank}").write_text(f"{modes} {trains}")

        @elastic.run(state, wait_s=600.0)
        def second(state: elastic.State) -> None:
            for _ in state.epochs(2):
                for numbers, x in loader:
                    do_step("second", numbers, x)
                    if state.step == 5:
                        manager.save(5, parts)

        second(state)
        manager.close()
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(),
                "modes": [layer.training for layer in model.modules()],
                "steps": [state.step, state.epoch],
            },
            folder / f"end-{rank}.pt",
        )


def elastic_number() -> int:
    """Return 0 in one of the job's first processes."""
    from phalanx.backend import rendezvous

    return rendezvous.generation()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
