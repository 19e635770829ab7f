"""Authenticate PyTorch's collectives of objects (`all_gather_object`, `send_object_list`, …) between hosts.

torch pickles and unpickles objects in two helper functions; their replacements here add and check a MAC. The helpers do
not receive the call for which they run, so each object collective records it: a number binds a message to its call.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.torch_names import report_loss
from phalanx._comm.backend.torch_integration.groups import pickle_authenticator
from phalanx._comm.backend.torch_integration.patch import distributed_c10d, patch
from phalanx._comm.transport.authentication import OVERHEAD_BYTES, PickleAuthenticator, PickleStream

_COLLECTIVES = {
    "all_gather_object": "object_list, obj, group",
    "gather_object": "object_gather_list, dst, group, group_dst",
    "broadcast_object_list": "object_list, src, group, group_src",
    "scatter_object_list": "scatter_object_input_list, src, group, group_src",
    "send_object_list": "object_list, dst, group, group_dst",
    "recv_object_list": "object_list, src, group, group_src",
}
_C10D = "torch.distributed.distributed_c10d"
_REPLAYED = "objects that collectives send between hosts may be replayed in place of other objects"
_UNKNOWN_CALL = PickleStream("object of an unknown call", 0)


@patch(
    f"{_C10D}._object_to_tensor(obj, device, group)",
    f"{_C10D}._tensor_to_object(tensor, tensor_size, group)",
    loses="objects that collectives send between hosts are pickles without a MAC",
)
def authenticate_object_collectives() -> None:
    """Add a MAC to the pickles of torch's object collectives between hosts; needed until torch authenticates them."""
    c10d: Any = distributed_c10d()
    to_tensor, to_object = c10d._object_to_tensor, c10d._tensor_to_object

    def _object_to_tensor(obj: Any, device: Any, group: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        pickles = pickle_authenticator(group)
        if pickles is None:
            result: tuple[Tensor, Tensor] = to_tensor(obj, device, group, *args, **kwargs)
            return result
        call = _running.call
        try:
            pickled, size = to_tensor(obj, "cpu", group, *args, **kwargs)
        except BaseException:
            if call is not None:
                call.cancel_send()
            raise
        data = pickled.numpy().tobytes()
        message = pickles.sign(data, _UNKNOWN_CALL, 0) if call is None else call.sign(data)
        tensor = torch.frombuffer(bytearray(message), dtype=torch.uint8).clone()  # torch resizes it
        return tensor.to(device), (size + OVERHEAD_BYTES).to(device)

    def _tensor_to_object(tensor: Tensor, tensor_size: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        pickles = pickle_authenticator(group)
        if pickles is None:
            return to_object(tensor, tensor_size, group, *args, **kwargs)
        message = tensor.cpu().numpy().tobytes()[: int(tensor_size)]
        call = _running.call
        data = pickles.verify(message, _UNKNOWN_CALL, 0) if call is None else call.verify(message)
        pickled = bytearray(data)
        return to_object(torch.frombuffer(pickled, dtype=torch.uint8), len(pickled), group, *args, **kwargs)

    c10d._object_to_tensor, c10d._tensor_to_object = _object_to_tensor, _tensor_to_object


@patch(
    *(f"{_C10D}.{name}.__wrapped__({parameters})" for name, parameters in _COLLECTIVES.items()),
    loses=_REPLAYED,
)
def number_object_collectives() -> None:
    """Record each call of an object collective for the functions that pickle; needed until torch authenticates pickles.

    The collectives are wrapped inside torch's own decorator, so that this also affects references that a program
    imported earlier.
    """
    c10d: Any = distributed_c10d()
    for name in _COLLECTIVES:
        outer = getattr(c10d, name)
        cells = [cell for cell in outer.__closure__ or () if cell.cell_contents is outer.__wrapped__]
        if not cells:
            report_loss(f"has no wrapper around {_C10D}.{name}", _REPLAYED)
            return
        cells[0].cell_contents = _recording(outer.__wrapped__, name)


def _recording(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:  # torch raises the error
            return function(*args, **kwargs)
        group = arguments.get("group")
        pickles = pickle_authenticator(group)
        if pickles is None:
            return function(*args, **kwargs)
        outer, call = _running.call, _Call(name, arguments, dist.group.WORLD if group is None else group, pickles)
        _running.call = call
        try:
            return function(*args, **kwargs)
        finally:
            _running.call = outer

    return noted


class _Call:
    """A `_Call` is one call of an object collective on this rank; it assigns the call's objects to streams, in order.

    All objects of a call have the same number in their stream. The first object takes the next number: a call that
    fails before it sends or receives any object takes none, and a call that receives only some objects takes one.
    """

    def __init__(self, name: str, arguments: dict[str, Any], group: Any, pickles: PickleAuthenticator) -> None:
        self._kind = "send_object_list" if name == "recv_object_list" else name
        self._name = name
        self._arguments = arguments
        self._group = group
        self._pickles = pickles
        self._sent = self._received = 0
        self._sends: tuple[PickleStream, int] | None = None
        self._receives: list[tuple[PickleStream, int]] = []

    def sign(self, pickle: bytes) -> bytes:
        """Return `pickle`, the next object that this rank sends, as a message with a MAC."""
        if self._sends is None:
            to_one = self._kind in ("gather_object", "send_object_list")
            stream = PickleStream(self._kind, self._group.rank(), *([self._rank_of("dst")] if to_one else []))
            self._sends = stream, self._pickles.count_sent(stream)
        stream, number = self._sends
        message = self._pickles.sign(pickle, stream, number, self._sent)
        self._sent += 1
        return message

    def cancel_send(self) -> None:
        """Record that the next object could not be pickled, so that this call sends nothing."""
        if self._sends is not None:
            self._pickles.take_back(self._sends[0])
            self._sends = None

    def verify(self, message: bytes) -> bytes | memoryview:
        """Return the pickle of the next object that this rank receives.

        Raises:
            PhalanxError: this is not the message that is due next, or its MAC is wrong.
        """
        if not self._receives:
            self._receives = [(s, self._pickles.count_received(s)) for s in self._incoming()]
        at = self._received
        self._received += 1
        if self._kind in ("all_gather_object", "gather_object"):
            return self._pickles.verify(message, *self._receives[at])
        index = self._group.rank() if self._kind == "scatter_object_list" else at
        return self._pickles.verify(message, *self._receives[0], index)

    def _incoming(self) -> list[PickleStream]:
        me = self._group.rank()
        match self._name:
            case "all_gather_object":
                return [PickleStream(self._kind, src) for src in range(self._group.size())]
            case "gather_object":
                return [PickleStream(self._kind, src, me) for src in range(self._group.size())]
            case "recv_object_list":
                return [PickleStream(self._kind, self._rank_of("src"), me)]
        return [PickleStream(self._kind, self._rank_of("src"))]

    def _rank_of(self, end: str) -> int:
        """Return the group rank of the argument `end` (`src` or `dst`), as torch interprets it."""
        in_group = self._arguments.get(f"group_{end}")
        if in_group is not None:
            return int(in_group)
        return dist.get_group_rank(self._group, self._arguments.get(end) or 0)


class _Running(threading.local):
    """A `_Running` holds this thread's current call."""

    call: _Call | None = None


_running = _Running()
