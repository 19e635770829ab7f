"""Arrays of numpy arrive as they are, whatever their shape; what cannot be sent leaves nothing behind."""

from __future__ import annotations

import pickle
import random
import threading
from typing import Any

import numpy
import pytest
import torch
from tests.rpc.workers import run_caller, run_workers, same, worker

from phalanx import rpc
from phalanx.rpc import current, wire

TYPES = ["f4", "f8", "i2", "u1", "?", "c16", ">i4", "U3", "M8[s]", [("a", "f4"), ("b", "i8")]]


def draw_array(draw: random.Random) -> Any:
    """Return an array of any type, shape (often with a zero in it) and order; a large one now and then."""
    shape = [draw.choice([0, 1, 2, 3, 5]) for _ in range(draw.randint(0, 4))]
    if shape and draw.random() < 0.1:
        shape[draw.randrange(len(shape))] = 20_000
    array: Any = (
        numpy.array(numpy.frombuffer(draw.randbytes(max(1, int(numpy.prod(shape)))), "u1")[: int(numpy.prod(shape))])
        .astype(draw.choice(TYPES[:7]))
        .reshape(shape)
    )
    if draw.random() < 0.2:
        array = numpy.zeros(shape, draw.choice(TYPES[7:]))
    way = draw.randrange(4)
    if way == 1:
        array = numpy.asfortranarray(array)
    elif way == 2:
        array = array[::-1] if array.ndim else array
    elif way == 3:
        array.setflags(write=False)
    return array


def check(found: Any, sent: Any, where: object) -> None:
    sent = pickle.loads(pickle.dumps(sent, 5))  # numpy turns the bytes of some arrays round
    assert (type(found), found.dtype, found.shape) == (type(sent), sent.dtype, sent.shape), where
    assert found.tobytes() == sent.tobytes(), where


def _arrays() -> None:
    draw = random.Random(11)
    for number in range(150):
        arrays = [draw_array(draw) for _ in range(draw.randint(1, 4))]
        mixed = (*arrays, torch.arange(3), {"deep": arrays[0]})
        found = rpc.rpc_sync(draw.choice(["w0", "w1"]), same, mixed)[0]
        for one, sent in zip(found, arrays, strict=False):
            check(one, sent, number)
        check(found[-1]["deep"], arrays[0], number)


def test_arrays_of_every_shape_arrive():
    """One of two dimensions without elements raised a TypeError of memoryview's, and its call was never over."""
    run_caller(_arrays, 2)


def _refuse(view_bytes: Any) -> Any:
    """Return `view_bytes`, which fails for a buffer that begins as `BAD` does: as one that has gone by then would."""

    def view(buffer: Any) -> memoryview:
        found = view_bytes(buffer)
        if bytes(found[:4]) == b"bad!":
            raise BufferError("it cannot be sent")
        return found

    return view


BAD = numpy.frombuffer(b"bad!", numpy.uint8)


def make_bad() -> tuple[Any, ...]:
    return torch.ones(1 << 18), BAD, rpc.RRef(5)


def count_kept() -> list[int]:
    """Return how much this worker keeps for others: memory that it shares, objects and references."""
    agent = current.agent()
    return [len(agent.connections.lender._lent), *agent.references.count().values()]


def _fails(rank: int, folder: str) -> None:
    wire.view_bytes = _refuse(wire.view_bytes)
    with worker(rank, 2, folder, rpc_timeout=0):
        if rank:
            return
        for to, bad in [("w0", threading.Lock()), ("w1", threading.Lock()), ("w1", BAD)] * 2:
            for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
                with pytest.raises((BufferError, TypeError)):
                    call(to, same, (torch.ones(1 << 18), bad, rpc.RRef(3)))
            with pytest.raises(BufferError):
                rpc.rpc_sync("w1", make_bad)
        assert (count_kept(), current.agent().num_in_flight) == ([0, 0, 0, 0], 0)
        assert rpc.rpc_sync("w1", count_kept) == [0, 0, 0, 0]


def test_a_call_that_cannot_be_sent_is_not_under_way():
    """`shutdown` waited for its answer: for ever, where calls have no time limit. One of a worker to itself left a
    reference in its table."""
    run_workers(_fails, 2)
