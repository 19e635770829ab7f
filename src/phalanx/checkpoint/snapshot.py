"""Copy tensors into host memory that is kept for the next copy.

Training waits only for the copy. The first write to fresh memory costs two or three times the copy itself, since the
kernel zeroes every page; so the memory is kept, in huge pages where the system has them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import OrderedDict, deque
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from phalanx._base.torch_names import find

_neg_view: Any = find("torch._neg_view", loses="phalanx.checkpoint does not copy a negative view")

_ALIGN = 64


class SnapshotMemory:
    """`SnapshotMemory` has room for one snapshot at a time. The memory grows as needed, and is kept."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._at = 0

    def begin(self, nbytes: int, count: int) -> None:
        """Make room for a new snapshot of `count` pieces, `nbytes` in total; the previous snapshot is overwritten."""
        room = nbytes + count * _ALIGN
        if self._memory is None or len(self._memory) < room:
            self._memory = mmap.mmap(-1, max(room, 1))
            with contextlib.suppress(OSError, AttributeError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._at = 0

    def allocate(self, nbytes: int) -> Tensor:
        """Return a piece of the memory, as bytes in its own storage."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        assert self._memory is not None
        piece = torch.frombuffer(memoryview(self._memory)[self._at : self._at + nbytes], dtype=torch.uint8)
        self._at += math.ceil(nbytes / _ALIGN) * _ALIGN
        return piece

    def release(self) -> None:
        """Release the memory; pieces still in use stay valid."""
        self._memory = None


def copy_contiguous(tensors: Iterable[Tensor], memory: SnapshotMemory) -> list[Tensor]:
    """Return contiguous copies of the tensors on the CPU, the form that torch.distributed.checkpoint stores."""
    sources = [tensor.detach() for tensor in tensors]
    plain = [_is_plain(tensor) for tensor in sources]
    memory.begin(sum(t.nbytes for t, is_plain in zip(sources, plain, strict=True) if is_plain), len(sources))
    copies = []
    for source, is_plain in zip(sources, plain, strict=True):
        if is_plain:
            copies.append(memory.allocate(source.nbytes).view(source.dtype).view(source.shape).copy_(source))
        else:
            copies.append(source.cpu().clone())
    return copies


def copy_tree(state: Any, memory: SnapshotMemory) -> Any:
    """Return a copy of `state`: its tensors on the CPU, and copies of all other values that can change.

    Copies share memory where the originals do, so that torch.save writes the same file.
    """
    tensors: dict[int, Tensor] = {}
    _collect(state, tensors)
    storages = {storage._cdata: storage for t in tensors.values() if _is_plain(t) for storage in (t.untyped_storage(),)}
    memory.begin(sum(storage.nbytes() for storage in storages.values()), len(storages))
    copies = {}
    for key, storage in storages.items():
        copy = memory.allocate(storage.nbytes())
        if storage.nbytes():
            copy.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        copies[key] = copy.untyped_storage()
    # as the memo of copy.deepcopy: the copies are keyed by the id of the original
    known: dict[int, Any] = {key: _copy(tensor, copies) for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        if (own := vars(tensor)) and known[key] is not tensor:  # attributes that the user has set on the tensor
            vars(known[key]).update(_rebuild(own, known))
    return _rebuild(state, known)


def _collect(value: Any, tensors: dict[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        if id(value) not in tensors:
            tensors[id(value)] = value
            _collect(vars(value), tensors)  # attributes that the user has set
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, tensors)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            _collect(item, tensors)


def _rebuild(value: Any, known: dict[int, Any]) -> Any:
    if type(value) in (int, float, str, bool, bytes, type(None)):
        return value
    if isinstance(value, Tensor):
        return known[id(value)]
    if type(value) is dict:
        return {key: _rebuild(item, known) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_rebuild(item, known) for item in value)
    if type(value) is OrderedDict:
        made = OrderedDict((key, _rebuild(item, known)) for key, item in value.items())
        vars(made).update(_rebuild(vars(value), known))  # the versions in a module's state_dict
        return made
    try:
        return deepcopy(value, known)
    except Exception:  # a value that cannot be copied cannot be saved either: the writer reports it
        return value


def _copy(tensor: Tensor, copies: dict[int, torch.UntypedStorage]) -> Tensor:
    if tensor.is_meta:  # no values to copy
        return tensor
    if not _is_plain(tensor):
        return tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad)
    copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
    copy.set_(copies[tensor.untyped_storage()._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        copy = copy.conj()
    if tensor.is_neg():
        copy = _neg_view(copy)
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        copy.requires_grad_()
    return copy


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor consists only of its bytes."""
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested)
