"""Encode and decode the messages of a backward pass: "run your part", "gradients of your message".

    order (u8) · flags (u8) · 0 (2 u8) · number of the plan's messages, or of its bytes if it is pickled (u32)
    context · the pass (uid, number) · the message whose gradients these are (3), all u64
    the plan's messages (3 u64 each) and which of their tensors (bits, i64; -1: all); pickled if 63 bits are too few
    the gradients' formats and shapes, pickled; or a pickle of the gradients, if some are not dense

The memory of dense gradients is sent out of band.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.rpc.autograd.graph import MessageId
from phalanx.rpc.serialization import deserialize, serialize
from phalanx.rpc.wire import Frame, Order
from phalanx.rpc.worker_info import WorkerAddress

Plan = Sequence[tuple[MessageId, int]]  # messages, and which of their tensors: bits, or -1 for all
PassId = tuple[int, int]  # the uid of the worker that called backward, and its number there

_HEAD = struct.Struct("<BBxxI6Q")
_PLANNED = struct.Struct("<3Qq")
_MOST_BITS = 63
_GRADIENTS = int(Order.GRADIENTS)
_BEGIN, _RETAIN_GRAPH, _HAS_GRADIENTS, _IS_PICKLED, _IS_LARGE = 1, 2, 4, 8, 16
NO_MESSAGE = (0, 0, 0)
_DTYPES = {"f": torch.float32, "d": torch.float64}  # by the format of a buffer
_MOST_KNOWN = 4096
_MOST_COPIED = 1 << 14  # bytes; larger gradients that are not contiguous are pickled, unless they are expanded

Kinds = tuple[Any, ...]  # format and shape of each tensor in turn; None, None for a missing tensor
_as_bytes: dict[Kinds, bytes] = {}
_as_kinds: dict[bytes, Kinds] = {}


class PassMessage(NamedTuple):
    """A `PassMessage` has `gradients` of the tensors of `message`, and a `plan` if the receiver is to run its part."""

    context_id: int
    pass_id: PassId
    message: MessageId
    gradients: Sequence[Tensor | None] | None
    plan: Plan | None
    retain_graph: bool


def write(
    to: WorkerAddress,
    context_id: int,
    pass_id: PassId,
    message: MessageId = NO_MESSAGE,
    gradients: Sequence[Tensor | None] | None = None,
    plan: Plan | None = None,
    retain_graph: bool = False,
) -> tuple[bytes, Sequence[Any]]:
    """Return the bytes of a message, and the buffers that are sent out of band."""
    flags, kinds = 0, b""
    buffers: list[Any] = []
    if gradients is not None:
        flags = _HAS_GRADIENTS
        found = _describe(gradients, buffers)
        if found is None:
            payload = serialize(tuple(gradients), to)
            kinds, buffers = payload.data, payload.buffers
            flags |= _IS_PICKLED
        else:
            kinds = found
    if plan is None:
        return _HEAD.pack(_GRADIENTS, flags, 0, context_id, *pass_id, *message) + kinds, buffers
    flags |= _BEGIN | _RETAIN_GRAPH if retain_graph else _BEGIN
    if any(mask >> _MOST_BITS > 0 for _, mask in plan):
        flags |= _IS_LARGE
        planned = pickle.dumps(plan, 5)
        length = len(planned)
    else:
        planned = b"".join([_PLANNED.pack(*message, mask) for message, mask in plan])
        length = len(plan)
    head = _HEAD.pack(_GRADIENTS, flags, length, context_id, *pass_id, *message)
    return b"".join([head, planned, kinds]), buffers


def _describe(gradients: Sequence[Tensor | None], buffers: list[Any]) -> bytes | None:
    """Return formats and shapes, and add the tensors' memory to `buffers`; return None if a tensor is not dense."""
    kinds: list[Any] = []
    for one in gradients:
        if one is None:
            kinds += (None, None)
            continue
        if type(one) is not Tensor:
            return None
        try:
            memory = memoryview(one.numpy())  # type: ignore[arg-type]
        except (TypeError, RuntimeError):  # sparse, on a device, conjugate, or a dtype that numpy does not have
            return None
        if memory.format not in _DTYPES or not memory.nbytes:
            return None
        if not memory.c_contiguous:  # such as the gradient of a sum, one expanded element
            if memory.nbytes >= _MOST_COPIED and 0 not in one.stride():
                return None
            memory = memoryview(one.contiguous().numpy())  # type: ignore[arg-type]
        kinds += (memory.format, memory.shape)
        buffers.append(memory)
    key = tuple(kinds)
    found = _as_bytes.get(key)
    if found is None:
        if len(_as_bytes) >= _MOST_KNOWN:
            _as_bytes.clear()
        found = _as_bytes[key] = pickle.dumps(key, 5)
    return found


def read_pass(frame: Frame) -> tuple[int, PassId]:
    """Return the ids of a message's context and pass, which can be read even if its tensors cannot."""
    _, _, _, context_id, uid, number, *_ = _HEAD.unpack_from(frame.data)
    return context_id, (uid, number)


def read(frame: Frame) -> PassMessage:
    """Return the message in a frame."""
    data = frame.data
    _, flags, length, context_id, uid, number, depth, sender, sent = _HEAD.unpack_from(data)
    at = _HEAD.size
    plan: Plan | None = None
    if flags & _BEGIN:
        end = at + (length if flags & _IS_LARGE else length * _PLANNED.size)
        if flags & _IS_LARGE:
            plan = pickle.loads(data[at:end])
        else:
            plan = [((one[0], one[1], one[2]), one[3]) for one in _PLANNED.iter_unpack(data[at:end])]
        at = end
    gradients: Sequence[Tensor | None] | None = None
    if flags & _HAS_GRADIENTS:
        if flags & _IS_PICKLED:
            gradients = deserialize(data[at:], frame.buffers)[0]
        else:
            gradients = _make(bytes(data[at:]), frame.buffers)
    return PassMessage(context_id, (uid, number), (depth, sender, sent), gradients, plan, bool(flags & _RETAIN_GRAPH))


def _make(written: bytes, buffers: Sequence[Any]) -> list[Tensor | None]:
    kinds = _as_kinds.get(written)
    if kinds is None:
        if len(_as_kinds) >= _MOST_KNOWN:
            _as_kinds.clear()
        kinds = _as_kinds[written] = pickle.loads(written)
    made: list[Tensor | None] = []
    memory = list(buffers)  # raises if a segment could not be mapped
    at = 0
    for number in range(0, len(kinds), 2):
        if kinds[number] is None:
            made.append(None)
        else:
            made.append(torch.frombuffer(memory[at], dtype=_DTYPES[kinds[number]]).view(kinds[number + 1]))
            at += 1
    return made
