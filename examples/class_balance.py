"""Classes of very different sizes: one pass counts them, and the pixels; sampler and model use what it found.

phalanx run --nproc-per-node 2 examples/class_balance.py
"""

from collections import Counter

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import phalanx
from phalanx.mapreduce import map_reduce

job = phalanx.init()
images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
rare = labels % 2 == 1  # of the odd digits nine in ten are missing
keep = ~rare | (torch.arange(len(labels)) % 10 == 0)
data = TensorDataset(images[keep].float(), labels[keep])


def statistics(sample):
    """The map function of a sample: one more of its class; one more, its pixels and their squares, of all."""
    image, label = sample
    yield ("class", int(label)), torch.tensor([1.0], dtype=torch.float64)
    yield ("pixels", 0), torch.tensor([image.numel(), image.sum(), image.square().sum()], dtype=torch.float64)


# Any two values can be added, so sums are made where the samples are read, and only those travel.
found = dict(map_reduce(data, statistics, lambda key, sums: sum(sums), combine=torch.add, gather=True))
count, total, squares = found["pixels", 0].tolist()
mean, deviation = total / count, (squares / count - (total / count) ** 2) ** 0.5
sizes = {label: int(number) for (kind, label), number in found.items() if kind == "class"}

weights = [1 / sizes[int(label)] for _, label in data]
generator = torch.Generator().manual_seed(job.rank)  # each rank draws for itself
sampler = WeightedRandomSampler(weights, len(data) // job.world_size, generator=generator)
seen: Counter[int] = Counter()
for x, y in DataLoader(data, batch_size=32, sampler=sampler):
    normalised = (x - mean) / deviation  # what a model would be given
    assert normalised.abs().max() < 10
    seen.update(y.tolist())

if job.is_main:
    print(f"pixels: mean {mean:.4f}, deviation {deviation:.4f}")
    print("samples of each digit:", " ".join(str(sizes[digit]) for digit in range(10)))
    print("drawn in one epoch:   ", " ".join(str(seen[digit]) for digit in range(10)))
