"""Two hosts with a slow link between them: the loss of synchronous training, with a twentieth of its bytes.

    sudo python examples/slow_link.py            makes two hosts (network namespaces) with 50 Mbit/s between them,
                                                 trains on them in step and by DiLoCo, and counts
                                                 what leaves a host

On two hosts of your own, on each of them:

    phalanx run --nnodes 2 ... examples/slow_link.py diloco          (or mirrored, local_sgd)
"""

import argparse
import ast
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from phalanx import strategies
from phalanx._comm.control.key import Key
from phalanx.testing import hosts, why_no_hosts

CONTEXT, WIDTH, BATCH = 32, 128, 64  # letters; of the model; windows of all replicas together
OPTIONS = {  # what goes over the link: all gradients at each step; all of the model after every 24th
    "multi_worker_mirrored": {},
    "local_sgd": {"sync_every": 24},
    "diloco": {"sync_every": 24},
}

parser = argparse.ArgumentParser(description="Train a small language model on two hosts with a slow link.")
parser.add_argument("strategies", nargs="*", default=["multi_worker_mirrored", "diloco"])
parser.add_argument("--steps", type=int, default=480)
parser.add_argument("--rate", default="50mbit", help="of the link, in the words of tc")


class Model(nn.Module):
    """The next letter, from those before it: convolutions that do not look ahead."""

    def __init__(self, letters: int):
        super().__init__()
        self.letter = nn.Embedding(letters, WIDTH)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, dilation=2**i) for i in range(3))
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, text):
        hidden = self.letter(text).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + F.relu(layer(F.pad(hidden, (2 * layer.dilation[0], 0))))
        return self.head(hidden.transpose(1, 2)).flatten(0, 1)


def read_windows() -> tuple[torch.Tensor, int]:
    """The documentation of Python's standard library in windows, and how many letters there are."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    text = "\n\n".join(filter(None, texts)).encode("ascii", "ignore")
    letters = torch.tensor(list(text), dtype=torch.int64)
    return letters.unfold(0, CONTEXT + 1, CONTEXT // 2), 128


def train(name: str, num_steps: int) -> None:
    """The same script under each strategy."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    windows, letters = read_windows()
    windows = windows[torch.randperm(len(windows))]
    test, windows = windows[:512], windows[512:]
    strategy = strategies.get(name, **OPTIONS[name])
    with strategy.scope():
        model = Model(letters)
    strategy.setup(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        lambda out, target: F.cross_entropy(out, target.flatten()),
    )
    loader = strategy.loader(TensorDataset(windows[:, :-1], windows[:, 1:]), BATCH, drop_last=True)
    step, begun = 0, time.monotonic()
    while step < num_steps:
        for batch in loader:
            strategy.step(*batch)
            step += 1
            if step == num_steps:
                break
    strategy.finish()  # all ranks have the same model
    loss = F.cross_entropy(strategy.evaluate(test[:, :-1]), test[:, 1:].flatten())
    if strategy.is_main:
        print(f"{step} steps in {time.monotonic() - begun:.1f} s: loss {loss:.4f} on text that was not trained on")
    strategy.close()


def compare(names: list[str], num_steps: int, rate: str) -> None:
    """Train under each on two hosts; what has left the first one's interface."""
    if why := why_no_hosts():
        sys.exit(f"two hosts cannot be made here: {why}")
    for name in names:
        with hosts(2, rate=rate) as machines:
            where = ["--nnodes", "2", "--master-addr", machines[0].address, "--master-port", "29512"]
            words = [sys.executable, "-m", "phalanx", "run", *where, "--nproc-per-node", "1"]
            script = [__file__, name, "--steps", str(num_steps)]
            environment = {**os.environ, "PHALANX_KEY": str(Key.generate()), "OMP_NUM_THREADS": "1"}
            running = [
                subprocess.Popen(
                    [*machine.command, *words, "--node-rank", str(number), *script],
                    env=environment,
                    stdout=None if number == 0 else subprocess.DEVNULL,
                )
                for number, machine in enumerate(machines)
            ]
            print(f"\n{name}:", flush=True)
            if any([process.wait() for process in running]):  # of all, also behind one that failed
                sys.exit(f"{name} failed")
            print(f"{name}: {machines[0].bytes_sent() / 1e6:.1f} MB have left the first host", flush=True)


if __name__ == "__main__":
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        train(arguments.strategies[0], arguments.steps)
    else:
        compare(arguments.strategies, arguments.steps, arguments.rate)
