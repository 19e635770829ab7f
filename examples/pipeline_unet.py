"""A U-Net in stages: what its first layers see goes straight to the last ones, past the stages between.

    phalanx run --nproc-per-node 3 pipeline_unet.py

It finds the discs in pictures of noise, discs and bars. Layers cost very different amounts, so the cut is measured.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import phalanx

parser = argparse.ArgumentParser(description="Train a convolutional network with skip connections in pipeline stages.")
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--balance", default="auto", choices=["auto", "time", "memory"])
parser.add_argument("--checkpoint", default="never", choices=["never", "except_last", "always"])
args = parser.parse_args()
SIZE, BATCH, MICRO_BATCHES = 32, 32, 8


def convolve(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class UNet(nn.Module):
    """Down twice, up twice; each way up sees what the way down saw at its size."""

    def __init__(self, width):
        super().__init__()
        self.inwards = convolve(1, width)
        self.down1, self.down2 = convolve(width, 2 * width), convolve(2 * width, 4 * width)
        self.bottom = convolve(4 * width, 4 * width)
        self.up2, self.up1 = convolve(6 * width, 2 * width), convolve(3 * width, width)
        self.outwards = nn.Conv2d(width, 1, 1)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, pictures):
        full = self.inwards(pictures)
        half = self.down1(self.pool(full))
        quarter = self.bottom(self.down2(self.pool(half)))
        half = self.up2(torch.cat([self.grow(quarter), half], 1))
        return self.outwards(self.up1(torch.cat([self.grow(half), full], 1))).squeeze(1)


def draw_pictures(count):
    """Pictures, and where in them the disc is."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    centres, radii = torch.randint(6, SIZE - 6, (count, 2, 1, 1)), torch.randint(3, 7, (count, 1, 1))
    discs = (x - centres[:, 0]) ** 2 + (y - centres[:, 1]) ** 2 < radii**2
    bars = (x - torch.randint(SIZE, (count, 1, 1))).abs() < 2
    return ((discs | bars).float() + 0.3 * torch.randn(count, SIZE, SIZE)).unsqueeze(1), discs.float()


job = phalanx.init()
torch.manual_seed(0)  # the same model and pictures on every rank
pictures, discs = draw_pictures(512)
pipe = phalanx.Pipeline(
    UNet(args.width),
    micro_batches=MICRO_BATCHES,
    balance=args.balance,
    checkpoint=args.checkpoint,
    example=pictures[: BATCH // MICRO_BATCHES],
    loss_fn=functional.binary_cross_entropy_with_logits,
)
optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
if job.is_main:
    print(pipe.plan)
for step in range(args.steps):
    chosen = torch.randint(len(pictures), (BATCH,))
    optimizer.zero_grad()
    loss = pipe.step(pictures[chosen], target=discs[chosen])
    optimizer.step()
    if job.is_main and (step + 1) % (args.steps // 4) == 0:
        print(f"step {step + 1}: loss {loss:.4f}")

pipe.eval()
pictures, discs = draw_pictures(128)
found = pipe(pictures)  # on the last stage, None elsewhere
if found is not None:
    both, either = ((found > 0) & (discs > 0)).sum(), ((found > 0) | (discs > 0)).sum()
    print(f"overlap with the discs {both / either:.3f}")
phalanx.save_checkpoint("unet.pt", {"model": pipe.state_dict()})  # as of the UNet itself, however it was cut
if job.is_main:
    whole = UNet(args.width)
    phalanx.load_checkpoint("unet.pt", into={"model": whole})
