"""A context is a worker's record of a forward pass and its backward passes, until its opener closes the context."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from phalanx.errors import PhalanxError
from phalanx.rpc.autograd.graph import MessageId, SentMessage
from phalanx.rpc.worker_info import WorkerAddress

_NUMBER_BITS = 48
_MOST_RELEASED = 10_000
_ONCE: Counter[int] = Counter()


class Context:
    """A `Context` is one context on one worker. `origin` is the uid of the worker that opened it."""

    def __init__(self, context_id: int, origin: int) -> None:
        self.id = context_id
        self.origin = origin
        self.has_ended = False  # functions called in the context may still run, and may call other workers
        self.lock = threading.Lock()
        self.known: dict[int, WorkerAddress] = {}  # the workers to which this one has sent the context
        self.sends: dict[MessageId, SentMessage] = {}
        self.received: dict[MessageId, Any] = {}
        self.passes: dict[tuple[int, int], Any] = {}
        self.gradients: dict[Tensor, Tensor] = {}

    def accumulate(self, found: Sequence[tuple[Tensor, Tensor]], *, is_shared: bool = False) -> None:
        """Add gradients to those of the context. A variable's first gradient is kept without a copy if possible.

        With `is_shared`, tensors that are not in `found` may share the gradients' memory.
        """
        counts = Counter(_memory(gradient) for _, gradient in found) if len(found) > 1 else _ONCE
        with self.lock:
            for variable, gradient in found:
                before = self.gradients.get(variable)
                if before is not None:
                    # Not in place: callers of `get_gradients` may use the old tensor.
                    gradient = gradient + before if before.is_sparse else before + gradient
                elif is_shared or (counts and counts[_memory(gradient)] > 1) or not _is_plain(gradient, variable):
                    gradient = gradient.clone()
                self.gradients[variable] = gradient

    # the methods that PyTorch's contexts have

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[MessageId, Any]:
        return {message: SendFunction(send) for message, send in self.sends.items()}

    def _recv_functions(self) -> dict[MessageId, Any]:
        return dict(self.received)

    def _known_worker_ids(self) -> set[int]:
        return {member.info.id for member in self.known.values()}


class SendFunction:
    """A `SendFunction` imitates PyTorch's autograd node for a sent message."""

    def __init__(self, send: SentMessage) -> None:
        nodes: list[Any] = [stub.grad_fn for stub in send.stubs]
        self.next_functions = tuple(edge for node in nodes for edge in node.next_functions)


def _memory(tensor: Tensor) -> int:
    return (tensor._values() if tensor.is_sparse else tensor).data_ptr()


def _is_plain(gradient: Tensor, variable: Tensor) -> bool:
    """Return whether a gradient is contiguous, or has the strides of its variable."""
    if gradient.is_sparse:
        return gradient._indices().is_contiguous() and gradient._values().is_contiguous()
    return gradient.is_contiguous() or (not variable.is_sparse and gradient.stride() == variable.stride())


class Contexts:
    """`Contexts` are all contexts of this worker, and the current context of each thread."""

    def __init__(self, rank: int, uid: int) -> None:
        self._uid = uid
        self._first = rank << _NUMBER_BITS
        start = int.from_bytes(os.urandom(5), "little")  # a worker that joins again must not reuse an id
        self._numbers = itertools.count(start)
        self._lock = threading.Lock()
        self._by_id: dict[int, Context] = {}
        self._released: OrderedDict[int, None] = OrderedDict()
        self._thread = threading.local()

    @property
    def max_id(self) -> int:
        """Return the largest possible id of a context that this worker opens."""
        return self._first + (1 << _NUMBER_BITS) - 1

    @property
    def current(self) -> Context | None:
        return getattr(self._thread, "context", None)

    def open(self) -> Context:
        context = Context(self._first + next(self._numbers), self._uid)
        with self._lock:
            self._by_id[context.id] = context
        return context

    def enter(self, context: Context | None) -> ContextScope:
        """Enter a context in this thread, as a context manager."""
        return ContextScope(self._thread, context)

    def find(self, context_id: int) -> Context:
        """Return the context with this id.

        Raises:
            PhalanxError: there is no such context.
        """
        context = self._by_id.get(context_id)
        if context is None:
            raise PhalanxError(
                f"Could not find autograd context with id: {context_id}. No call in it has reached this worker, or it "
                "has ended: use it inside of `with phalanx.rpc.autograd.context()`."
            )
        return context

    def find_open(self, context_id: int) -> Context | None:
        """Return the context with this id; None if no call in the context has reached this worker.

        Raises:
            PhalanxError: the context has ended.
        """
        return self.find(context_id) if context_id in self._released else self._by_id.get(context_id)

    def get(self, context_id: int) -> Context | None:
        """Return the context with this id; None if there is none."""
        return self._by_id.get(context_id)

    def find_or_open(self, context_id: int, origin: int) -> Context | None:
        """Return the context of a message, opened if it is new on this worker; None if it has ended meanwhile."""
        context = self._by_id.get(context_id)
        if context is not None:
            return context
        with self._lock:
            if context_id in self._released:
                return None
            return self._by_id.setdefault(context_id, Context(context_id, origin))

    def release(self, context_id: int) -> Context | None:
        """Remove a context that has ended; return it, or None if it had ended before."""
        with self._lock:
            self._released[context_id] = None
            while len(self._released) > _MOST_RELEASED:
                self._released.popitem(last=False)
            context = self._by_id.pop(context_id, None)
        if context is not None:
            context.has_ended = True
        return context

    def all(self) -> list[Context]:
        return list(self._by_id.values())


class ContextScope:
    """A `ContextScope` puts this thread in a context while it is entered."""

    __slots__ = ("_before", "_context", "_thread")

    def __init__(self, thread: threading.local, context: Context | None) -> None:
        self._thread = thread
        self._context = context
        self._before: Context | None = None

    def __enter__(self) -> None:
        self._before = getattr(self._thread, "context", None)
        self._thread.context = self._context

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.context = self._before
