"""A small language model in stages: each rank holds some of its blocks, and micro-batches flow through them.

    phalanx run --nproc-per-node 2 pipeline_transformer.py
    phalanx run --nproc-per-node 4 pipeline_transformer.py --schedule zero_bubble --micro-batches 16

The letters are Python's own documentation; the embedding is the output layer, too, though they are in different stages.
"""

import argparse
import ast
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import phalanx

parser = argparse.ArgumentParser(description="Train a language model in pipeline stages.")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--blocks", type=int, default=6)
parser.add_argument("--micro-batches", type=int, default=8)
parser.add_argument("--schedule", default="1f1b")
args = parser.parse_args()
CONTEXT, BATCH = 64, 32


class Block(nn.Module):
    """Causal attention and two linear layers, each beside a way around it."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, -1))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """An ordinary module: nothing in it knows that it will be cut."""

    def __init__(self, letters):
        super().__init__()
        self.embed = nn.Embedding(letters, args.width)
        self.position = nn.Parameter(torch.randn(CONTEXT, args.width) / 50)
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.blocks))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, letters, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight  # tied

    def forward(self, letters):
        x = self.embed(letters) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_corpus():
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    texts = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in modules)
    return "\n\n".join(texts).encode("ascii", "ignore").decode()


def cross_entropy(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


job = phalanx.init()
torch.manual_seed(0)  # the same model on every rank
corpus = read_corpus()
alphabet = sorted(set(corpus))
letters = torch.tensor([alphabet.index(letter) for letter in corpus])


def draw_batch():
    begins = torch.randint(len(letters) - CONTEXT, (BATCH,)).tolist()
    windows = torch.stack([letters[begin : begin + CONTEXT + 1] for begin in begins])
    return windows[:, :-1], windows[:, 1:]


pipe = phalanx.Pipeline(
    LanguageModel(len(alphabet)),
    micro_batches=args.micro_batches,
    schedule=args.schedule,
    example=letters[: CONTEXT * (BATCH // args.micro_batches)].view(-1, CONTEXT),
    loss_fn=cross_entropy,
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)  # of this rank's stages
if job.is_main:
    print(pipe.plan)
for step in range(args.steps):
    x, y = draw_batch()
    optimizer.zero_grad()
    loss = pipe.step(x, target=y)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    if job.is_main and (step + 1) % (args.steps // 4) == 0:
        print(f"step {step + 1}: {loss / math.log(2):.2f} bits per letter")
