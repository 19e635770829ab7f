"""Small models at random, from pieces in which a gradient's memory is also somebody else's.

A model is a chain of pieces over `h` of shape (1, N, N): one sample, so that what autograd hands to a parameter is
often a view of what goes on to flow upstream. With N = 256 matrices and `h` itself have 256 KiB, from which on
gradients are written into memory that the ranks share; with N = 24 nothing has.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Both(torch.autograd.Function):
    """The sum of two; its backward returns one tensor for both."""

    @staticmethod
    def forward(ctx, one, other):
        return one + other

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class BothViews(Both):
    """As `Both`, with two views of one tensor, one of them of the other's storage only."""

    @staticmethod
    def backward(ctx, grad):
        return grad.view(-1).view(grad.shape), grad.detach()


class Keeps(torch.autograd.Function):
    """Its input; its backward returns what came, and keeps it for the next one."""

    kept: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        Keeps.kept[:] = [grad]
        return grad


class Given(torch.autograd.Function):
    """The sum of two; its backward makes memory that holds both gradients, one behind the other."""

    @staticmethod
    def forward(ctx, one, other):
        return one + other

    @staticmethod
    def backward(ctx, grad):
        both = torch.stack([grad, grad * 2])
        return both[0], both[1]


class Matrix(nn.Module):
    """One parameter of N x N that is added to `h`, one of many ways."""

    WAYS = ("unsqueeze", "expand", "view", "reshape", "transpose", "minus", "indexed", "keeps", "slice", "flat")

    def __init__(self, size, way):
        super().__init__()
        self.way, self.weight = way, nn.Parameter(torch.randn(size, size) * 0.1)

    def forward(self, h):
        w = self.weight
        return {
            "unsqueeze": lambda: h + w.unsqueeze(0),
            "expand": lambda: h + w.unsqueeze(0).expand_as(h),
            "view": lambda: h + w.view(1, *w.shape),
            "reshape": lambda: w.reshape(1, *w.shape) + h,
            "transpose": lambda: h + w.t().unsqueeze(0),
            "minus": lambda: h - w.unsqueeze(0),
            "indexed": lambda: h + w[None],
            "keeps": lambda: h + Keeps.apply(w.unsqueeze(0)),
            "slice": lambda: torch.cat([h[:, :5] + w[:5], h[:, 5:] + w[5:].unsqueeze(0)], 1),
            "flat": lambda: (h.view(-1) + w.view(-1)).view_as(h),
        }[self.way]()


class Pair(nn.Module):
    """Two parameters that are given the same gradient, or views of one."""

    WAYS = ("sum", "each", "both", "both_views", "given", "minus")

    def __init__(self, size, way):
        super().__init__()
        self.way = way
        self.one, self.other = (nn.Parameter(torch.randn(size, size) * 0.1) for _ in range(2))

    def forward(self, h):
        one, other = self.one, self.other
        return {
            "sum": lambda: h + (one + other).unsqueeze(0),
            "each": lambda: h + one.unsqueeze(0) + other.unsqueeze(0),
            "both": lambda: h + Both.apply(one, other),
            "both_views": lambda: h + BothViews.apply(one.unsqueeze(0), other.unsqueeze(0)),
            "given": lambda: h + Given.apply(one, other),
            "minus": lambda: h + (one - other)[None],
        }[self.way]()


class Attention(nn.Module):
    """Of one head, with a bias on the scores."""

    def __init__(self, size):
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.bias = nn.Parameter(torch.randn(size, size) * 0.1)

    def forward(self, h):
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        return h + (scores + self.bias.unsqueeze(0)).softmax(-1) @ v


class Convolution(nn.Module):
    """1 x 1, in either memory format."""

    def __init__(self, size, memory_format):
        super().__init__()
        self.inner = nn.Conv2d(size, size, 1).to(memory_format=memory_format)

    def forward(self, h):
        return h + self.inner(h.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)


class Column(nn.Module):
    """A parameter whose memory is transposed."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size).t() * 0.1)

    def forward(self, h):
        return h + h @ self.weight + self.weight.unsqueeze(0)


class Checkpointed(nn.Module):
    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, h):
        return checkpoint(self.inner, h, use_reentrant=self.use_reentrant)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, h):
        return h + self.inner(h)


class Twice(nn.Module):
    """Tied: the same parameters two times."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, h):
        return self.inner(torch.tanh(self.inner(h)))


class Idle(nn.Module):
    """Parameters that take part in some steps only, on some ranks only."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.on = inner, True

    def forward(self, h):
        return self.inner(h) if self.on else h


class Tanh(nn.Module):
    def forward(self, h):
        return torch.tanh(h)


class Chain(nn.Module):
    """The pieces; the sum of squares of an embedding's sample that went through them, and an auxiliary output."""

    def __init__(self, size, pieces):
        super().__init__()
        self.embedding = nn.Embedding(size + 3, size)
        self.pieces = nn.ModuleList(pieces)
        self.head = nn.Linear(size, 5)

    def forward(self, rows):
        h = self.embedding(rows)
        for piece in self.pieces:
            h = piece(h)
        return self.head(h), h.mean()


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; `seed` makes all of it."""

    seed: int
    size: int
    steps: int
    zero: str  # "none" sets gradients to None, "zeros" to zero, "never" adds to them
    micro_batches: int
    backward: str
    hooks: tuple[str, ...]
    when: str  # hooks are registered before or after the model is wrapped
    keeps: bool  # the user keeps gradients of steps before
    assigned: str  # what the user assigns to some `.grad` before a backward
    optimizer: str
    options: dict[str, object] = field(hash=False)
    clips: bool

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        choose = random.Random(self.seed)
        reentrant = not self.options["find_unused_parameters"]  # PyTorch's DDP can't have both
        return Chain(self.size, [_piece(choose, self.size, 2, reentrant) for _ in range(choose.randint(1, 4))])

    def batch(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + rank)
        return torch.randint(0, self.size + 3, (1, self.size), generator=generator)


def _piece(choose: random.Random, size: int, depth: int, reentrant: bool) -> nn.Module:
    plain: list[Callable[[], nn.Module]] = [
        lambda: Matrix(size, choose.choice(Matrix.WAYS)),
        lambda: Matrix(size, choose.choice(Matrix.WAYS)),
        lambda: Pair(size, choose.choice(Pair.WAYS)),
        lambda: Attention(size),
        lambda: nn.Linear(size, size, bias=choose.random() < 0.5),
        lambda: nn.LayerNorm(size),
        lambda: Tanh(),
        lambda: Convolution(size, choose.choice([torch.contiguous_format, torch.channels_last])),
        lambda: Column(size),
    ]
    nested: list[Callable[[], nn.Module]] = [
        lambda: Residual(_piece(choose, size, depth - 1, reentrant)),
        lambda: Twice(_piece(choose, size, depth - 1, False)),
        lambda: Checkpointed(_piece(choose, size, 0, False), reentrant and choose.random() < 0.5),
        lambda: Idle(_piece(choose, size, depth - 1, reentrant)),
    ]
    return choose.choice(plain + nested if depth else plain)()


HOOKS = ("parameter", "accumulated", "module", "h", "doubles", "views", "node")


def draw(seed: int) -> Case:
    """The case of a seed."""
    choose = random.Random(-seed - 1)
    idle = choose.random() < 0.25
    static = not idle and choose.random() < 0.2
    options: dict[str, object] = {
        "find_unused_parameters": idle,
        "static_graph": static,
        "bucket_cap_mb": choose.choice([0.001, 0.3, 25.0]),
        "check": choose.random() < 0.5,
    }
    zero = "none" if idle else choose.choice(["none", "none", "none", "zeros", "never"])
    backward = choose.choice(["plain", "plain", "plain", "retained", "penalty", "grad_beside", "scaled"])
    if not idle and choose.random() < 0.1:
        backward = "past_the_wrapper"
    optimizer = choose.choice(["sgd", "momentum", "zero", "zero_slices"])
    if optimizer == "zero_slices" and (zero != "none" or backward == "past_the_wrapper"):  # refused, in words
        optimizer = "zero"
    return Case(
        seed=seed,
        size=choose.choice([256, 256, 256, 24]),
        steps=choose.choice([2, 3, 4]),
        zero=zero,
        micro_batches=1 if idle or static else choose.choice([1, 1, 1, 2]),
        backward=backward,
        hooks=tuple(choose.sample(HOOKS, choose.choice([0, 0, 1, 2]))),
        when=choose.choice(["before", "after"]),
        keeps=choose.random() < 0.4,
        assigned="nothing" if idle else choose.choice(["nothing"] * 4 + ["random", "flat", "shared"]),
        optimizer=optimizer,
        options=options,
        clips=not idle
        and not optimizer.startswith("zero")
        and choose.random() < 0.3,  # ZeRO clips slices, in another order
    )
