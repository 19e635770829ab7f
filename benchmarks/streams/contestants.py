"""Loaders over the same samples, in tar files and in chunks of litData: what each rank of a job iterates over."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import phalanx
from phalanx.data import Stream, from_litdata, from_webdataset


def number_of_tar(sample: dict[str, Any]) -> int:
    """Decode a sample as a training script would: this returns its number, and its bytes as a tensor."""
    return int(sample["txt"]) + 0 * int(torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8)[0])


def number_of_chunk(sample: dict[str, Any]) -> int:
    return int(sample["number"]) + 0 * int(torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8)[0])


def write_data(folder: Path, shards: int, samples: int, sample_bytes: int) -> None:
    """The same samples as tar files and as chunks; half of the bytes are random."""
    from litdata.streaming.writer import BinaryWriter

    random = np.random.default_rng(0)
    chunks = folder / "chunks"
    chunks.mkdir(parents=True)
    writer = BinaryWriter(str(chunks), chunk_size=samples)
    number = 0
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05}.tar", "w") as tar:
            for _ in range(samples):
                data = random.bytes(sample_bytes)
                for name, content in ((f"{number:09}.txt", str(number).encode()), (f"{number:09}.bin", data)):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                writer[number] = {"number": number, "bin": data}
                number += 1
    writer.done()
    writer.merge()


class Loader:
    """Iterates over a rank's batches; another one goes on from the middle with the `state` that `save` returned."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.loader = make()

    def save(self, batches: int) -> Any:
        return batches

    def load(self, state: Any) -> None:
        raise NotImplementedError

    def __iter__(self) -> Any:
        return iter(self.loader)


class OfPhalanx(Loader):
    def __init__(self, stream: Stream, rank: int, ranks: int, batch: int, workers: int) -> None:
        self.batch = batch
        sampler = phalanx.DistributedSampler(stream, ranks, rank)
        super().__init__(lambda: DataLoader(stream, batch, sampler=sampler, num_workers=workers))

    def save(self, batches: int) -> Any:
        return self.loader.sampler.state_dict(batches * self.batch)

    def load(self, state: Any) -> None:
        self.loader.sampler.load_state_dict(state)


class OfWebdataset(Loader):
    """It has no position: who goes on reads on to there."""

    def __init__(self, urls: list[str], rank: int, ranks: int, batch: int, workers: int) -> None:
        import webdataset

        dataset = (
            webdataset.WebDataset(
                urls, shardshuffle=1000, nodesplitter=webdataset.shardlists.split_by_node, seed=0, empty_check=False
            )
            .shuffle(128)
            .map(number_of_tar)
        )
        self._skip = 0
        super().__init__(lambda: DataLoader(dataset, batch, num_workers=workers))

    def load(self, state: Any) -> None:
        self._skip = state

    def __iter__(self) -> Any:
        iterator = iter(self.loader)
        for _ in range(self._skip):
            next(iterator)
        return iterator


class OfLitdata(Loader):
    def __init__(self, folder: str, rank: int, ranks: int, batch: int, workers: int) -> None:
        import litdata

        dataset = litdata.StreamingDataset(folder, shuffle=True, seed=0, transform=number_of_chunk)
        super().__init__(lambda: litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=workers))

    def save(self, batches: int) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def make_loader(name: str, folder: Path, rank: int, ranks: int, batch: int, workers: int) -> Loader:
    """The contestant of that name."""
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    place = rank, ranks, batch, workers
    numbers: dict[str, int] = {"block": batch * ranks}
    if name in ("webdataset", "litdata"):  # which look there
        os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "GLOBAL_RANK": str(rank), "NNODES": "1"}
    if name == "webdataset":
        return OfWebdataset(urls, *place)
    if name == "litdata":
        return OfLitdata(str(folder / "chunks"), *place)
    if name == "phalanx, tar":
        index = folder / "index.json"
        return OfPhalanx(from_webdataset(urls, index=index, transform=number_of_tar, **numbers), *place)
    if name == "phalanx, tar, read on":
        lengths = from_webdataset(urls, index=folder / "index.json").lengths.tolist()
        stream = Stream(urls, _iterate_tar, lengths=lengths, transform=number_of_tar, **numbers)
        return OfPhalanx(stream, *place)
    if name == "phalanx, litdata":
        return OfPhalanx(from_litdata(folder / "chunks", transform=number_of_chunk, **numbers), *place)
    raise ValueError(name)


def _iterate_tar(url: str) -> Any:
    """A tar file as a stream: no index, nothing is skipped."""
    from phalanx.data.webdataset import _iterate_tar as samples

    return samples(url)
