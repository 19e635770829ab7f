"""A language model over two workers: its embedding and its decoder are on one, its LSTM on the other.

    phalanx run --nproc-per-node 2 examples/remote_language_model.py

It learns the words of the Python standard library's sources: a token is a word, a number, or one sign. Most of its
parameters are in the two matrices with a row for each word, and stay where they are: ids go to the server and vectors
come back; hidden vectors go there, and one number comes back, the loss. Gradients take the same ways in the other
direction. The trainer then trains the same model in one process with PyTorch alone, and prints how both do on a text
that neither has seen.
"""

import argparse
import os
import re
import sysconfig
from collections import Counter
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from phalanx import rpc
from phalanx.optim import DistributedOptimizer

parser = argparse.ArgumentParser(description="A language model whose embedding and decoder are on another worker.")
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--words", type=int, default=2000)
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()
LENGTH, BATCH, LR = 32, 16, 4e-3


def corpus() -> torch.Tensor:
    """The words of the modules from a to d, as numbers: the most frequent is 1, and 0 are all that are rare."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    found = [word for path in paths for word in re.findall(r"\w+|[^\w\s]", path.read_text(encoding="utf-8"))]
    numbers = {word: number for number, (word, _) in enumerate(Counter(found).most_common(args.words - 1), 1)}
    return torch.tensor([numbers.get(word, 0) for word in found])


def batches(ids: torch.Tensor):
    """Windows and the words that follow each of theirs, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator)
        windows = ids[starts[:, None] + torch.arange(LENGTH + 1)]
        yield windows[:, :-1], windows[:, 1:]


class Ends(nn.Module):
    """The first layer and the last one, each with a row for each word."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(args.words, args.width)
        self.decoder = nn.Linear(args.width, args.words)

    def embed(self, ids):
        return self.embedding(ids)

    def loss(self, hidden, targets):
        """How badly hidden vectors tell the next words."""
        return nn.functional.cross_entropy(self.decoder(hidden).flatten(0, 1), targets.flatten())

    def references(self):
        return [rpc.RRef(one) for one in self.parameters()]


def make_lstm() -> nn.LSTM:
    """What lies between the two."""
    torch.manual_seed(2)
    return nn.LSTM(args.width, args.width, batch_first=True)


def train_remote(train, test, server: str) -> float:
    """The LSTM here, the rest on `server`; gives back the loss on the test."""
    ends, lstm = rpc.remote(server, Ends), make_lstm()

    def loss_of(ids, targets):
        hidden, _ = lstm(ends.rpc_sync().embed(ids))
        return ends.rpc_sync().loss(hidden, targets)

    parameters = [*ends.rpc_sync().references(), *(rpc.RRef(one) for one in lstm.parameters())]
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=LR)
    for step, (ids, targets) in enumerate(islice(batches(train), args.steps)):
        with rpc.autograd.context() as context_id:
            loss = loss_of(ids, targets)
            rpc.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        return float(loss_of(*test))


def train_alone(train, test) -> float:
    """The same in one process, with PyTorch alone."""
    ends, lstm = Ends(), make_lstm()
    optimizer = torch.optim.Adam([*ends.parameters(), *lstm.parameters()], lr=LR)
    for ids, targets in islice(batches(train), args.steps):
        optimizer.zero_grad()
        ends.loss(lstm(ends.embed(ids))[0], targets).backward()
        optimizer.step()
    ids, targets = test
    with torch.no_grad():
        return float(ends.loss(lstm(ends.embed(ids))[0], targets))


torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
name = ["trainer", "server"][int(os.environ["RANK"])]
rpc.init_rpc(name)
if name == "trainer":
    ids = corpus()
    hidden_from_training = len(ids) // 20
    windows = ids[-hidden_from_training:].unfold(0, LENGTH + 1, LENGTH)
    train, test = ids[:-hidden_from_training], (windows[:, :-1], windows[:, 1:])
    remote, alone = train_remote(train, test, "server"), train_alone(train, test)
    print(f"{len(train):,} words of training, {test[1].numel():,} of test, a vocabulary of {args.words:,}")
    print(f"two workers: test loss {remote:.6f}")
    print(f"one process: test loss {alone:.6f}")
rpc.shutdown()
