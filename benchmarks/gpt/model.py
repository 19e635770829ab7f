"""GPT-2 as nanoGPT writes it, of 30 million parameters, and the text that it reads: the help topics of Python."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LAYERS, HEADS, WIDTH = 256, 6, 10, 640  # bytes need no tokenizer
BLOCK, BATCH = 64, 12  # what nanoGPT's README says for a CPU; the batch is of one rank
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 6e-4, (0.9, 0.95), 0.1, 1.0  # nanoGPT's defaults
WARMUP_STEPS = 10  # nanoGPT's are 2,000 of 600,000


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        heads = self.attention(self.norm_1(hidden)).view(batch, length, 3 * HEADS, WIDTH // HEADS).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return hidden + self.perceptron(self.norm_2(hidden))


class GPT(nn.Module):
    """A language model; the embedding of a token is also its row in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("projection.weight", "perceptron.2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * LAYERS) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss: the wrappers of all contestants see one call with one result."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    """Return the parameters in nanoGPT's two groups: matrices decay, the others do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def read_text() -> Tensor:
    """Return Python's help topics as bytes: about 460,000, in each installation of Python."""
    from pydoc_data.topics import topics

    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.long)


def batch_of(text: Tensor, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return the batch of one rank in one step; it is the same for every contestant."""
    generator = torch.Generator().manual_seed(1337 + step * world_size + rank)
    starts = torch.randint(len(text) - BLOCK, (BATCH,), generator=generator)
    windows = text[starts[:, None] + torch.arange(BLOCK + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
