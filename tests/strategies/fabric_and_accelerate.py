"""The left sides of docs/how-to/strategies.md's second table, run in Lightning Fabric and Accelerate on two ranks.

By hand, with a Python that has both and nothing of ours, in the repository:

    python tests/strategies/fabric_and_accelerate.py > tests/strategies/fabric_and_accelerate.json

Of rank 0, whose results are those of all here.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.strategies.tf_distribute import W, X, Y

LOOPS: dict[str, dict[str, Any]] = {
    "train": {},
    "train 22": {"size": 22},
    "accumulate": {"accumulate": 3},
    "clip": {"max_norm": 0.5},
    "accumulate and clip": {"accumulate": 3, "max_norm": 0.5},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


def make_model() -> nn.Linear:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(W).T)
        model.bias.zero_()
    return model


def make_data(size: int) -> TensorDataset:
    return TensorDataset(torch.tensor(X[:size]), torch.tensor(Y[:size]))


def matrix(rank: int) -> torch.Tensor:
    return torch.tensor([[1.0, 2, 3], [4, 5, 6]]) * (rank + 1)


def shown(losses: list[float], model: nn.Module) -> list[Any]:
    return [losses, *(one.detach().flatten().tolist() for one in model.parameters())]


def with_fabric() -> dict[str, Any]:
    import lightning
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()

    def train(size=24, accumulate=1, max_norm=None, precision="32-true"):
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision)
        fabric.launch()
        model = make_model()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        loader = fabric.setup_dataloaders(DataLoader(make_data(size), 4))
        losses = []
        for _ in range(2):
            for number, (inputs, targets) in enumerate(loader, start=1):
                with fabric.no_backward_sync(model, enabled=number % accumulate != 0):
                    loss = F.mse_loss(model(inputs), targets)
                    fabric.backward(loss / accumulate)
                losses.append(float(fabric.all_reduce(loss.detach())))
                if number % accumulate == 0:
                    if max_norm is not None:
                        fabric.clip_gradients(model, optimizer, max_norm=max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
        return shown(losses, model)

    return {
        "lightning": lightning.__version__,
        "all_reduce": fabric.all_reduce(matrix(fabric.global_rank)).tolist(),
        "all_gather": fabric.all_gather(matrix(fabric.global_rank)).tolist(),
        **{name: train(**options) for name, options in LOOPS.items()},
    }


def with_accelerate() -> dict[str, Any]:
    import accelerate
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    def train(size=24, accumulate=1, max_norm=None, precision="no", split_batches=False):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            mixed_precision=precision.removesuffix("-mixed"),
            dataloader_config=DataLoaderConfiguration(split_batches=split_batches),
        )
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = DataLoader(make_data(size), 8 if split_batches else 4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, data)
        losses = []
        for _ in range(2):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = F.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    if max_norm is not None and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        return shown(losses, model)

    loops = {name: train(**options) for name, options in LOOPS.items()}
    split = train(split_batches=True)
    accelerator = accelerate.Accelerator(cpu=True)
    return {
        "accelerate": accelerate.__version__,
        "reduce": accelerator.reduce(matrix(accelerator.process_index)).tolist(),
        "gather": accelerator.gather(matrix(accelerator.process_index)).tolist(),
        **loops,
        "split_batches": split,
    }


def main() -> None:
    if "RANK" in os.environ:
        with contextlib.redirect_stdout(sys.stderr):
            results = {"fabric": with_fabric, "accelerate": with_accelerate}[sys.argv[1]]()
        if os.environ["RANK"] == "0":
            print(json.dumps(results), flush=True)
        torch.distributed.barrier()
        os._exit(0)  # threads of Gloo may end a process that only returns
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    recorded = {
        name: json.loads(subprocess.run([*launch, name], check=True, stdout=subprocess.PIPE, text=True).stdout)
        for name in ("fabric", "accelerate")
    }
    print(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    main()
