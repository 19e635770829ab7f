"""Train a transformer, letter by letter, on the documentation strings of Python's standard library.

Alone:         python examples/char_transformer.py
On two cores:  phalanx run --nproc-per-node 2 examples/char_transformer.py (or torchrun)
"""

import argparse
import ast
import math
import sysconfig
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import phalanx

parser = argparse.ArgumentParser(description="Train a small language model on Python's own documentation.")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--sample", type=int, default=200, help="how many letters to write at the end")
args = parser.parse_args()
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def read_corpus() -> str:
    """The documentation strings of the modules at the top of the standard library, in the order of their names."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, DOCUMENTED)]
    return "\n\n".join(filter(None, texts)).encode("ascii", "ignore").decode()


class Windows(Dataset):
    """Every stretch of `context` letters, with the letters that follow each of them."""

    def __init__(self, letters: torch.Tensor, context: int):
        self.letters, self.context = letters, context

    def __len__(self) -> int:
        return len(self.letters) - self.context

    def __getitem__(self, at: int):
        window = self.letters[at : at + self.context + 1]
        return window[:-1], window[1:]


class Transformer(nn.Module):
    """Two causal layers over learnt embeddings of letters and positions."""

    def __init__(self, letters: int, context: int, width: int):
        super().__init__()
        self.letter, self.position = nn.Embedding(letters, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        hidden = self.letter(x) + self.position(torch.arange(size))
        return self.head(self.layers(hidden, nn.Transformer.generate_square_subsequent_mask(size), is_causal=True))


job = phalanx.init()
torch.manual_seed(0)
corpus = read_corpus()
alphabet = sorted(set(corpus))
data = Windows(torch.tensor([alphabet.index(letter) for letter in corpus]), args.context)
loader = DataLoader(data, batch_size=16, sampler=phalanx.DistributedSampler(data))
model = phalanx.DistributedDataParallel(Transformer(len(alphabet), args.context, args.width))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

steps = iter(loader)
for part in range(8):
    bar = phalanx.progress(islice(steps, args.steps // 8), total=args.steps // 8, desc=f"part {part + 1}/8")
    for before, after in bar:
        loss = nn.functional.cross_entropy(model(before).flatten(0, 1), after.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.update(bits_per_letter=loss / math.log(2))

if job.is_main:
    text = data.letters[: args.context]
    with torch.no_grad():
        for _ in range(args.sample):
            chances = model.module(text[None, -args.context :])[0, -1].softmax(0)
            text = torch.cat([text, chances.multinomial(1)])
    print("".join(alphabet[letter] for letter in text[args.context :]))
