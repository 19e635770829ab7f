"""Run all_reduce of sparse COO tensors: gather all ranks' entries, and sum them in the order of the ranks."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx._comm.transport.base import CallContext, Transport
from phalanx._comm.transport.several import copy_to_others
from phalanx.errors import MismatchError


def all_reduce(transport: Transport, tensors: Sequence[Tensor], ctx: CallContext) -> None:
    """Replace each tensor by the sum over ranks, and over the tensors of each rank, coalesced.

    Shape: the same on every rank, with the same number of sparse dimensions; the number of entries may differ.
    Cost: one gather if there are few entries, otherwise three; every rank temporarily holds all ranks' entries.

    Raises:
        MismatchError: the ranks' tensors differ in dtype, shape or sparse dimensions; no tensor was changed.
    """
    with torch.no_grad():
        mine = functools.reduce(operator.add, tensors).coalesce()
    copy_to_others(tensors, add_up(transport, mine, ctx))


def add_up(transport: Transport, mine: Tensor, ctx: CallContext, *, divisor: float | None = None) -> Tensor:
    """Return the coalesced sum of all ranks' coalesced tensors; divide each entry by `divisor` before the addition."""
    indices, values = mine.indices().t().contiguous(), mine.values()
    counts, gathered = _exchange_packets(transport, _say(mine), indices, values, ctx)
    all_indices, all_values = gathered or _exchange(transport, counts, indices, values, ctx)
    if divisor is not None:
        all_values /= divisor
    return torch.sparse_coo_tensor(
        all_indices.t(), all_values, mine.shape, device=mine.device, check_invariants=False
    ).coalesce()


_Entries = tuple[Tensor, Tensor]  # the indices, one entry a row, and the values
_HEAD_BYTES = 16  # the number of entries, and a digest of the form; the data after it are aligned for any dtype


def _say(tensor: Tensor) -> str:
    """Return, as text, the properties that must be the same on every rank; the transport sees only bytes."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"a sparse {dtype} tensor of shape {tuple(tensor.shape)}, {tensor.sparse_dim()} of its dimensions sparse"


def _exchange_packets(
    transport: Transport, form: str, indices: Tensor, values: Tensor, ctx: CallContext
) -> tuple[list[int], _Entries | None]:
    """Return how many entries each rank has, and the entries themselves if every rank's fit into its packet.

    One gather replaces three: another rendezvous costs the ranks more than sending a few unused bytes.
    """
    packet = torch.zeros(transport.eager_bytes, dtype=torch.uint8, device="cpu")
    head = packet[:_HEAD_BYTES].view(torch.int64)
    head[0], head[1] = len(values), _digest(form)
    parts = _cut(packet, len(values), indices, values)
    if parts is not None:
        for part, own in zip(parts, (indices, values), strict=True):
            part.copy_(own)
    packets = torch.empty((transport.world_size, transport.eager_bytes), dtype=torch.uint8, device="cpu")
    transport.all_gather_single(packets, packet, ctx)
    heads = packets.view(torch.int64)
    if (heads[:, 1] != head[1]).any():
        raise _mismatch(transport, form, ctx)
    counts = heads[:, 0].tolist()
    cut = [_cut(theirs, n, indices, values) for theirs, n in zip(packets, counts, strict=True)]
    entries = [parts for parts in cut if parts is not None]
    if len(entries) < len(cut):
        return counts, None
    return counts, (torch.cat([part[0] for part in entries]), torch.cat([part[1] for part in entries]))


def _digest(form: str) -> int:
    return int.from_bytes(hashlib.blake2b(form.encode(), digest_size=8).digest(), "little", signed=True)


def _mismatch(transport: Transport, form: str, ctx: CallContext) -> MismatchError:
    """Gather all ranks' forms, and return the error. All ranks call this, since each has detected that they differ."""
    said = form.encode()[: transport.eager_bytes].ljust(transport.eager_bytes)
    texts = torch.empty((transport.world_size, transport.eager_bytes), dtype=torch.uint8, device="cpu")
    transport.all_gather_single(texts, torch.frombuffer(bytearray(said), dtype=torch.uint8), ctx)
    calls = {rank: bytes(text.tolist()).decode(errors="replace").rstrip() for rank, text in enumerate(texts)}
    return MismatchError(
        f"all_reduce in group {transport.group!r} on rank {transport.rank}: the ranks' sparse tensors differ; no "
        "tensor was changed.\n  " + "\n  ".join(f"rank {rank}: {text}" for rank, text in calls.items()) + "\n"
        "Give all ranks tensors of one dtype and shape, with the same number of sparse dimensions.",
        calls=calls,
    )


def _cut(packet: Tensor, n: int, indices: Tensor, values: Tensor) -> _Entries | None:
    """Return views of the `n` entries in a packet, shaped like the given ones; None if `n` entries do not fit."""
    middle = _HEAD_BYTES + -(-8 * n * indices.shape[1] // 16) * 16
    row = values.shape[1:].numel() * values.element_size()
    if middle + n * row > packet.numel():
        return None
    first = packet[_HEAD_BYTES : _HEAD_BYTES + 8 * n * indices.shape[1]].view(torch.int64)
    second = packet[middle : middle + n * row].view(values.dtype)
    return first.view(n, indices.shape[1]), second.view(n, *values.shape[1:])


def _exchange(transport: Transport, counts: list[int], indices: Tensor, values: Tensor, ctx: CallContext) -> _Entries:
    """Return all ranks' entries; rank r has counts[r] of them."""
    all_indices = indices.new_empty((sum(counts), indices.shape[1]))
    all_values = values.new_empty((sum(counts), *values.shape[1:]))
    transport.gather(list(torch.split(all_indices, counts)), indices, ctx)
    transport.gather(list(torch.split(all_values, counts)), values, ctx)
    return all_indices, all_values
