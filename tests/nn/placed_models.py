"""Models for the tests of placement: what makes cutting hard, in a few layers each."""

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = torch.randint(0, 40, (4, 7), generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """A tied head, a skip over all blocks, a parameter that forward itself uses, a tensor made on the way."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 16)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3)], nn.LSTM(16, 16)
        )
        self.mid = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.ones(16))
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens):
        embedded = self.emb(tokens)
        hidden, _ = self.blocks(embedded)
        position = torch.arange(tokens.size(1), device=embedded.device).unsqueeze(-1)
        hidden = self.norm(self.mid(hidden) * self.scale + position + embedded)
        return {"logits": self.head(hidden), "hidden": hidden}


class UNet(nn.Module):
    """Skips that go far, a layer that is called twice, BatchNorm, torch.cat."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.shared = nn.Conv2d(8, 8, 3, padding=1)
        self.up1, self.up2 = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x, gain=2.0):
        a = F.relu(self.norm(self.down1(x)))
        b = F.relu(self.down2(F.avg_pool2d(a, 2)))
        b = self.shared(self.shared(b) * gain)
        c = F.interpolate(self.up1(b), scale_factor=2)
        return self.up2(torch.cat([a, c], dim=1)) + x


def sequential():
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.ReLU(),
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)),
        nn.BatchNorm1d(16),
        nn.Linear(16, 2),
    )


MODELS = {
    "tied": (Tied, lambda: (TOKENS,)),
    "unet": (UNet, lambda: (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)),
    "sequential": (sequential, lambda: (torch.randn(5, 8, generator=torch.Generator().manual_seed(0)),)),
}


def make(name):
    torch.manual_seed(1)
    new, example = MODELS[name]
    return new(), example()


def values(result):
    return list(result.values()) if isinstance(result, dict) else [result]
