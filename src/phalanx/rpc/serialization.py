"""Pickle objects with protocol 5, with the memory of their tensors out of band.

A dense tensor on the CPU is not copied into the pickle: the transport sends its memory as a separate buffer. A sparse
COO tensor is pickled as two dense tensors. All other tensors (compressed, quantized, on a GPU, subclasses) are pickled
as PyTorch pickles them; the parts of some are again dense tensors on the CPU. Other modules `register` reducers for
their own types (`RRef`).
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

FunctionCall = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
_NBYTES = struct.Struct("<H")  # the size of a function's name
_NO_NAME = _NBYTES.pack(0)
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
# Other dtypes are sent by name, as integers of the same size: PyTorch can copy few of them, and pickle none.
_BY_NAME = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and dtype not in _CODES and not name.startswith("q")  # quantized
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AS_IT_IS = frozenset(_CODES[one] for one in (torch.float32, torch.float64, torch.int64, torch.int32))
# types that need no reducer of ours
_PLAIN = frozenset((int, float, complex, str, bytes, bool, type(None)))
_MOST_GAPS = 4  # a tensor with gaps may span at most this many times the memory of its elements
_CPU = torch.device("cpu")
_NAMES_A_GLOBAL = pickle.STACK_GLOBAL  # without this byte a pickle of protocol 5 has no class and no function
_KNOWN = frozenset(("collections", "numpy", "phalanx", "torch"))  # unpickling their classes never waits
_MOST_NAMES, _MOST_NAME_BYTES = 4096, 4096


class Payload:
    """A `Payload` is an object to send: the pickle, the out-of-band memory, and the tensors that own that memory.

    `to` is the receiving worker, and `forks` are the references in the object.
    """

    __slots__ = ("buffers", "data", "forks", "is_answer", "kept", "sparse", "tensors", "to", "undo")

    def __init__(self, to: Any = None, is_answer: bool = False) -> None:
        self.to = to
        self.is_answer = is_answer  # the arrival of an answer is not confirmed
        self.data: bytes = b""
        self.buffers: list[Any] = []  # memory: anything with the buffer protocol
        self.tensors: list[Tensor] = []
        self.sparse: list[Tensor] = []
        self.forks: list[Any] = []
        self.kept: list[Any] = []  # must stay alive until the answer arrives
        self.undo: list[Callable[[], Any]] = []  # to call if the payload is not sent after all

    @property
    def nbytes(self) -> int:
        """Return how many bytes of memory the payload uses until its answer arrives."""
        return len(self.data) + sum(memoryview(b).nbytes for b in self.buffers)

    def revoke(self) -> None:
        """Undo the registration of the references in the payload, because it is not sent."""
        while self.undo:
            self.undo.pop()()


class _Current(threading.local):
    """`_Current` is the payload that this thread is pickling, or the tensors that it is unpickling."""

    payload: Payload | None = None
    arrived: ReceivedTensors | None = None


class ReceivedTensors:
    """`ReceivedTensors` are the tensors in a received object, in the order of `Payload.tensors`.

    `requires_grad` marks the tensors that required grad on the sender. The received tensors are leaves that require
    grad; with `without_grad` they do not require grad, and the caller attaches them to a graph.
    """

    __slots__ = ("forks", "requires_grad", "sparse", "sparse_requires_grad", "tensors", "without_grad")

    def __init__(self, forks: Sequence[Any] = (), without_grad: bool = False) -> None:
        self.tensors: list[Tensor] = []
        self.requires_grad: list[bool] = []
        self.sparse: list[Tensor] = []
        self.sparse_requires_grad: list[bool] = []
        self.forks = forks
        self.without_grad = without_grad

    def that_require_grad(self) -> list[Tensor]:
        """Return the tensors that required grad on the sender, first the dense and then the sparse ones."""
        found = [one for one, requires in zip(self.tensors, self.requires_grad, strict=True) if requires]
        found += [one for one, requires in zip(self.sparse, self.sparse_requires_grad, strict=True) if requires]
        return found


class _Names:
    """`_Names` caches module-level functions and their pickled names; each name is prefixed with its length."""

    def __init__(self) -> None:
        self._names: dict[FunctionType, bytes] = {}
        self._functions: dict[bytes, FunctionType] = {}

    def of(self, function: FunctionType) -> bytes | None:
        """Return the pickled name of a function; None if the function cannot be imported by its name."""
        if not _is_importable(function):
            return None
        name = self._names.get(function)
        if name is None:
            pickled = pickle.dumps(function, 5)
            if len(pickled) > _MOST_NAME_BYTES:
                return None
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            name = self._names[function] = _NBYTES.pack(len(pickled)) + pickled
        return name

    def find(self, name: bytes) -> FunctionType:
        function = self._functions.get(name)
        if function is None or not _is_importable(function):
            function = pickle.loads(memoryview(name)[_NBYTES.size :])
            assert function is not None
            if len(self._functions) >= _MOST_NAMES:
                self._functions.clear()
            if type(function) is FunctionType and _is_importable(function):
                self._functions[name] = function
        return function


def _is_importable(function: FunctionType) -> bool:
    """Return whether the function is a global of its module, under its own name."""
    module = sys.modules.get(function.__module__)
    return module is not None and module.__dict__.get(function.__qualname__) is function


names = _Names()
_current = _Current()
_table: dict[type, Callable[[Any], Any]] = {}


def register(kind: type, reduce: Callable[[Any, Payload], Any]) -> None:
    """Register `reduce`, which pickles objects of exactly this type and may add to their payload."""

    def reducer(obj: Any) -> Any:
        payload = _current.payload
        if payload is None:  # an ordinary pickle, not one for an RPC
            raise pickle.PicklingError(f"{kind.__name__} can only be sent by rpc")
        return reduce(obj, payload)

    _table[kind] = reducer


def serialize(obj: Any, to: Any = None, *, is_answer: bool = False) -> Payload:
    """Pickle `obj` for the worker `to`. Tensors are not copied: they must stay unchanged until they are sent."""
    payload = Payload(to, is_answer)
    if obj is None:  # the result of many calls
        return payload
    payload.data = pickle.dumps(obj, 5) if type(obj) in _PLAIN else _dump(obj, payload)
    return payload


def _dump(obj: Any, payload: Payload) -> bytes:
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 5, buffer_callback=payload.buffers.append)
    pickler.dispatch_table = _dispatch_table()
    before, _current.payload = _current.payload, payload
    try:
        pickler.dump(obj)
    except BaseException:
        payload.revoke()
        raise
    finally:
        _current.payload = before
    return stream.getvalue()


def deserialize(
    data: Any,
    buffers: Sequence[Any] = (),
    forks: Sequence[Any] = (),
    *,
    without_grad: bool = False,
    no_user_code: bool = False,
) -> tuple[Any, ReceivedTensors]:
    """Return the object, and the tensors in it.

    Raises:
        UserCodeError: `no_user_code` is set, and a class or function in the pickle may be the user's.
    """
    arrived = ReceivedTensors(forks, without_grad)
    if not data:
        return None, arrived
    before, _current.arrived = _current.arrived, arrived
    try:
        if no_user_code and _NAMES_A_GLOBAL in bytes(data):
            return _Cautious(io.BytesIO(data), buffers=buffers).load(), arrived
        return pickle.loads(data, buffers=buffers), arrived
    finally:
        _current.arrived = before


class UserCodeError(Exception):
    """Unpickling would run the user's code."""


class _Cautious(pickle.Unpickler):
    """A `_Cautious` unpickler uses only classes and functions of known libraries that are already imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in _KNOWN and module in sys.modules:
            return super().find_class(module, name)
        raise UserCodeError


def serialize_call(work: FunctionCall, to: Any) -> Payload:
    """Pickle a function and its arguments. The pickled name of a module-level function is cached."""
    function, args, kwargs = work
    payload = Payload(to)
    name = names.of(function) if type(function) is FunctionType else None
    if name is None:  # for example a method, whose object may also be among the arguments
        payload.data = _NO_NAME + _dump(work, payload)
    elif not kwargs and all(type(one) in _PLAIN for one in args):
        payload.data = name + pickle.dumps((args, kwargs), 5) if args else name
    elif args or kwargs:
        payload.data = name + _dump((args, kwargs), payload)
    else:
        payload.data = name
    return payload


def deserialize_call(
    data: bytes, buffers: Sequence[Any], forks: Sequence[Any], *, without_grad: bool
) -> tuple[FunctionCall, ReceivedTensors]:
    """Return the function and its arguments, and the tensors in them."""
    end = _NBYTES.unpack_from(data)[0] + _NBYTES.size
    if end == _NBYTES.size:
        return deserialize(memoryview(data)[end:], buffers, forks, without_grad=without_grad)
    function = names.find(data[:end])
    if end == len(data):
        return (function, (), {}), ReceivedTensors(forks, without_grad)
    (args, kwargs), arrived = deserialize(memoryview(data)[end:], buffers, forks, without_grad=without_grad)
    return (function, args, kwargs), arrived


def unpickling() -> ReceivedTensors:
    """Return the tensors and references of the object that this thread is unpickling."""
    arrived = _current.arrived
    if arrived is None:
        raise pickle.UnpicklingError("this pickle was made by rpc, and only rpc can read it")
    return arrived


_seen: tuple[int, dict[type, Any]] = (-1, {})


def _dispatch_table() -> dict[type, Any]:
    """Return copyreg's table merged with ours, including the types registered with copyreg since the last call."""
    global _seen
    version = len(copyreg.dispatch_table) + len(_table) * 65536
    if _seen[0] != version:
        _seen = version, {**copyreg.dispatch_table, **_table}
    return _seen[1]


def _reduce_tensor(tensor: Tensor, payload: Payload) -> Any:
    if tensor.layout is torch.sparse_coo and tensor.device == _CPU:
        payload.sparse.append(tensor)
        plain = tensor.detach()
        parts = plain._indices(), plain._values()
        return _sparse, (*parts, tuple(tensor.shape), tensor.is_coalesced(), tensor.requires_grad)
    dtype = tensor.dtype
    name = None if dtype in _CODES else _NAMES.get(dtype)
    if (name is None and dtype not in _CODES) or tensor.layout is not torch.strided or tensor.device != _CPU:
        return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    payload.tensors.append(tensor)
    requires_grad = tensor.requires_grad
    plain = tensor.detach() if requires_grad else tensor
    if name is not None:
        is_conj = plain.is_conj()  # some of these dtypes do not support resolve_conj
        plain = (plain.conj() if is_conj else plain).resolve_neg().view(_INTEGERS[plain.element_size()])
        return _tensor_by_name, (name, is_conj, requires_grad, *_lay_out(plain))
    code, shape, stride, memory = _lay_out(plain)
    return _tensor, (code, shape, stride, requires_grad, memory)


def _lay_out(plain: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, Any]:
    """Return the code of the dtype, the shape, the strides if the receiver must restore them, and the memory."""
    code, shape = _CODES[plain.dtype], tuple(plain.shape)
    if code in _AS_IT_IS and plain.is_contiguous() and plain.numel() and not plain.is_neg():
        array: Any = plain.numpy()
        return code, shape, None, pickle.PickleBuffer(array)
    flat, stride = _flat(plain)
    array = flat.view(torch.uint8).numpy() if flat.numel() else None
    memory = None if array is None else pickle.PickleBuffer(array)
    return code, shape, stride, memory


def _flat(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return the elements in memory order, and the strides to restore, if any; copy a tensor with gaps or overlaps."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.reshape(-1), None
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,)), tuple(tensor.stride())
    stride = tuple(tensor.stride()) if _is_gapped(tensor) else None
    return tensor.contiguous().reshape(-1), stride


def _is_gapped(tensor: Tensor) -> bool:
    """Return whether no elements overlap, and the gaps are small enough for the receiver to recreate them."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return False
            end = stride * (size - 1) + end
    return end <= _MOST_GAPS * tensor.numel()


def _tensor(
    code: int, shape: tuple[int, ...], stride: tuple[int, ...] | None, requires_grad: bool, memory: Any
) -> Tensor:
    return _receive_tensor(_rebuild(code, shape, stride, memory), requires_grad)


def _tensor_by_name(
    name: str,
    is_conj: bool,
    requires_grad: bool,
    code: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    memory: Any,
) -> Tensor:
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise TypeError(f"rpc: received a tensor of torch.{name}, which torch {torch.__version__} does not have")
    tensor = _rebuild(code, shape, stride, memory).view(dtype)
    return _receive_tensor(tensor.conj() if is_conj else tensor, requires_grad)


def _rebuild(code: int, shape: tuple[int, ...], stride: tuple[int, ...] | None, memory: Any) -> Tensor:
    if memory is None:
        tensor = torch.empty(shape, dtype=_DTYPES[code], device=_CPU)
    else:
        tensor = torch.frombuffer(memory, dtype=_DTYPES[code])
        if stride is None:
            tensor = tensor.view(shape)
        elif _span(shape, stride) == tensor.numel():
            tensor = tensor.as_strided(shape, stride)
        else:
            tensor = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=_CPU).copy_(tensor.view(shape))
    return tensor


def _receive_tensor(tensor: Tensor, requires_grad: bool) -> Tensor:
    arrived = unpickling()
    if requires_grad:
        if arrived.without_grad:
            tensor = tensor.detach()  # a view could not be attached to a graph
        else:
            tensor.requires_grad_()
    arrived.tensors.append(tensor)
    arrived.requires_grad.append(requires_grad)
    return tensor


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...], is_coalesced: bool, requires_grad: bool) -> Tensor:
    tensor = torch.sparse_coo_tensor(
        indices, values, shape, device=_CPU, check_invariants=False, is_coalesced=is_coalesced
    )
    arrived = unpickling()
    if requires_grad and not arrived.without_grad:
        tensor.requires_grad_()
    arrived.sparse.append(tensor)
    arrived.sparse_requires_grad.append(requires_grad)
    return tensor


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements the memory spans, from the first element to the last."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


register(Tensor, _reduce_tensor)
