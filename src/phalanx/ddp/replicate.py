"""Broadcast one rank's parameters and buffers, and gather a few numbers from every rank."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.torch_names import find
from phalanx._comm.backend.shared import sharing_group
from phalanx._comm.transport.tensors import copy_all
from phalanx.errors import MismatchError

# PyTorch's DDP packs tensors with these functions.
_LOSES = "parameters and buffers are not made equal on all ranks"
_flatten: Any = find("torch._utils._flatten_dense_tensors", loses=_LOSES)
_unflatten: Any = find("torch._utils._unflatten_dense_tensors", loses=_LOSES)

_neg_view: Any = find("torch._neg_view", loses="a model with a negative view as a buffer cannot be wrapped")

_MESSAGE_BYTES = 32 * 1024 * 1024  # limits the temporary memory
_ALIGN = 64
_SHOWN = 8  # the maximum number of tensors in an error message


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup, src: int = 0) -> None:
    """Overwrite `tensors` on every rank with rank `src`'s, bit by bit.

    Tensors are sent as bytes, so one message carries any mixture of dtypes; on the CPU it also carries a digest of
    dtypes and shapes. The widest elements come first, which keeps each tensor in the message aligned for its dtype.
    Version counters do not change: autograd may have saved a buffer for a later backward, as BatchNorm does in eval
    mode.

    Raises:
        MismatchError: CPU tensors in a message have other dtypes or shapes than the source's; the tensors of that
            message were not changed.
        RuntimeError: a tensor is sparse or nested; raised on every rank, before anything is sent.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in _memories(tensors):
        by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        members.sort(key=_width)
        message: list[Tensor] = []
        num_bytes = 0
        for tensor in members:
            message.append(tensor)
            num_bytes += tensor.nbytes
            if num_bytes >= _MESSAGE_BYTES:
                _broadcast(message, group, src)
                message, num_bytes = [], 0
        if message:
            _broadcast(message, group, src)


def gather_rows(mine: Tensor, group: dist.ProcessGroup) -> list[list[Any]]:
    """Gather every rank's `mine`, a small one-dimensional tensor; return one list per rank. All ranks call it."""
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


class BufferBroadcast:
    """A `BufferBroadcast` copies rank 0's buffers to all ranks before a forward: usually the same tensors each time.

    If ranks share memory, rank 0 does not wait for the readers, nor do the readers wait for each other; the group's
    next collective confirms that all ranks took part. Otherwise, and for tensors that are not on the CPU, buffers are
    sent by an ordinary broadcast.

    Cost: with shared memory, two copies and no message; all ranks read from rank 0's memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sharing = sharing_group(group)
        self._number = 0
        self._forms: list[_Form] = []
        self._digest = 0
        self._packed = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._places: list[Tensor] = []  # a view of `_packed` for each tensor

    def from_first(self, tensors: Iterable[Tensor], num_rounds: int = 0) -> None:
        """Overwrite `tensors` with rank 0's, bit by bit; version counters do not change, as in `broadcast_tensors`.

        `num_rounds` is the number of gradient rounds so far. Ranks compare it, which detects a forward that only some
        of them ran; otherwise ranks would silently read the buffers of an earlier step from then on.
        """
        given = [tensor for tensor in tensors if tensor.numel()]
        members = _memories(given)
        if self._sharing is None or not all(member.is_cpu for member in members):
            broadcast_tensors(given, self._group)
            return
        if not members:
            return
        forms = [(member.dtype, member.shape) for member in members]
        if forms != self._forms:
            self._forms, self._digest = forms, _digest(forms)
            self._packed, self._places = _pack(forms)
        is_source = self._group.rank() == 0
        if is_source:
            copy_all(self._places, members)
        self._sharing.broadcast_buffers(self._packed, 0, number=(num_rounds << 32 | self._number) ^ self._digest)
        self._number = (self._number + 1) & 0xFFFFFFFF
        if not is_source:
            copy_all(members, self._places)


def _memories(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return views of the tensors' elements in memory, without empty tensors.

    In the views, an expanded dimension has size 1, and the conjugate and negative bits are not set.

    Raises:
        RuntimeError: a tensor is sparse or nested.
    """
    memories = []
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise RuntimeError(
                f"DistributedDataParallel: a parameter or buffer ({kind}, {tensor.dtype}) cannot be sent to all ranks. "
                "Make it dense, or name it in _set_params_and_buffers_to_ignore_for_model."
            )
        if not tensor.numel():
            continue
        memory = tensor.data
        if memory.is_conj():
            memory = memory.conj()
        if memory.is_neg():
            memory = _neg_view(memory)
        sizes = [size if stride else 1 for size, stride in zip(memory.shape, memory.stride(), strict=True)]
        if sizes != list(memory.shape):
            strides = [stride or 1 for stride in memory.stride()]  # a stride of 0 prevents a view as bytes
            memory = memory.as_strided(sizes, strides)
        memories.append(memory)
    return memories


_Form = tuple[torch.dtype, torch.Size]


def _digest(forms: Sequence[_Form]) -> int:
    """Return a 64-bit digest of dtypes and shapes, which the received bytes do not reveal."""
    return int.from_bytes(hashlib.blake2b(repr(forms).encode(), digest_size=8).digest(), "little")


def _pack(forms: Sequence[_Form]) -> tuple[Tensor, list[Tensor]]:
    """Allocate one block; return it and, for each form, a view of it that is aligned for every dtype."""
    sizes = [-(-shape.numel() * dtype.itemsize // _ALIGN) * _ALIGN for dtype, shape in forms]
    with torch.inference_mode(False):  # the memory is kept for later forwards, which may train
        packed = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
        return packed, [
            piece[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for piece, (dtype, shape) in zip(torch.split(packed, sizes), forms, strict=True)
        ]


def _width(tensor: Tensor) -> tuple[int, str]:
    """Return a sort key: the widest tensors first, tensors of one dtype together."""
    return -tensor.dtype.itemsize, str(tensor.dtype)


def _broadcast(tensors: list[Tensor], group: dist.ProcessGroup, src: int) -> None:
    runs = [list(run) for _, run in itertools.groupby(tensors, key=_width)]  # torch packs tensors of a single dtype
    parts = [_flatten(run).view(torch.uint8) for run in runs]
    if tensors[0].is_cpu:  # on a GPU, comparing the digest would make the host wait
        forms = [(tensor.dtype, tensor.shape) for tensor in tensors]
        digest = torch.tensor([_digest(forms) >> 1, 0], device="cpu")  # 16 bytes: the rest stays aligned
        parts.insert(0, digest.view(torch.uint8))
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    dist.broadcast(packed, group=group, group_src=src)
    if group.rank() == src:
        return
    pieces = packed.split([part.numel() for part in parts])
    if tensors[0].is_cpu:
        if not torch.equal(pieces[0], parts[0]):
            raise MismatchError(
                f"DistributedDataParallel: the source's parameters or buffers differ in dtype or shape from this "
                f"rank's, which are {', '.join(f'{dtype} {tuple(shape)}' for dtype, shape in forms[:_SHOWN])}"
                f"{', ...' if len(forms) > _SHOWN else ''}.\nConvert and replace them in the same way on every rank."
            )
        pieces = pieces[1:]
    for run, part in zip(runs, pieces, strict=True):
        copy_all(run, _unflatten(part.view(run[0].dtype), run))
