"""`Wire` carries messages between stages: values forward, gradients backward, and notices of failed stages.

A message is a header of fixed size and its parts. The parts follow in the same frame (`FrameLengths`); if the frame is
too short, each part is a message of its own. A tensor in memory that both ranks map has no part. The form of the values
(how they nest, their dtypes, all dimensions but the first, and the strides of tensors that are not contiguous) is sent
only when it differs from the last one on the same edge; steps with and without a backward have separate last forms.

    header   status | bytes of the form | micro-batches of the step, rows of this one, rows of all, seed | flags
             | length of the frame, and bytes needed | (rows, place) of each tensor
"""

from __future__ import annotations

import contextlib
import math
import pickle
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.shared import shares_memory, sharing_group
from phalanx._comm.backend.torch_integration.groups import pickle_authenticator
from phalanx._comm.transport.authentication import PickleStream
from phalanx._comm.transport.memory_order import Strides, find_strides, flatten, restore
from phalanx.errors import MismatchError, PhalanxError
from phalanx.pipeline.early_all_reduce import LEAVING_S, keep_messages, reduces_early
from phalanx.pipeline.failure import StageFailedError, StageLostError, with_note
from phalanx.pipeline.nested import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

if TYPE_CHECKING:
    from phalanx._comm.backend.lending import Lending


class Edge(NamedTuple):
    """An `Edge` carries messages, in order, from one stage to another; `backward` if they are gradients."""

    source: int
    target: int
    backward: bool = False


class StepPlan(NamedTuple):
    """A `StepPlan` describes a step and one of its micro-batches; every message of values contains one.

    `micro_batches` and `all_rows` describe the step; `rows`, `seed` and `micro_batch` (its number, which is not sent)
    describe the micro-batch. With `has_state`, a stage has drawn random numbers, and the message's first value is the
    generators' state after the last draw.
    """

    micro_batches: int
    rows: int
    all_rows: int
    seed: int = 0
    has_state: bool = False
    micro_batch: int = 0


# A frame is a header and its parts in one message. Both ends know its length in advance, so that the receive can be
# posted before the frame is sent.
#
# All frames on an edge have the same length, whatever their contents, because some transports compare lengths; parts
# that do not fit follow in separate messages. Until a step has shown how much is sent, a frame is only a header. At the
# end of a step that succeeded on all ranks, both ends derive the new length from the messages that both have seen.
#
#     header | form, if it is new | tensors, each aligned to 64 bytes | unused

WORDS = 64
HEADER_BYTES = 8 * WORDS
MOST_BYTES = 2**20
"""The maximum size of a frame: it is copied once when sent, and a posted receive occupies its memory in advance."""
_ALIGNED = 64


class FrameLengths:
    """`FrameLengths` records the length of each edge's frames, in training and in evaluation."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[Edge, bool], int] = {}
        self._needed: dict[tuple[Edge, bool], int] = {}
        self._grad = False

    def begin(self, *, grad: bool) -> None:
        """Begin a step, with a backward or without one."""
        self._grad = grad
        self._needed.clear()

    def length_of(self, edge: Edge) -> int:
        return self._lengths.get((edge, self._grad), HEADER_BYTES)

    def note(self, edge: Edge, needed: int) -> None:
        """Record that a message needed `needed` bytes, whether or not its frame had room. Both ends record the same."""
        key = edge, self._grad
        self._needed[key] = max(self._needed.get(key, 0), needed)

    def end_step(self) -> None:
        """Lengthen frames to the most that a message has needed so far, up to `MOST_BYTES`. All ranks call it.

        If a message does not fit its frame, the frame has only a header, and the parts are sent separately.
        """
        for key, needed in self._needed.items():
            if needed <= MOST_BYTES:
                self._lengths[key] = max(needed, self._lengths.get(key, HEADER_BYTES))
        self._needed.clear()


def end_of(begin: int, nbytes: Iterable[int]) -> int:
    """Return the end of parts of these sizes that begin at offset `begin`."""
    return begin + sum(map(aligned, nbytes))


def aligned(nbytes: int) -> int:
    """Return the aligned size of a part."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def tensor_in(frame: Tensor, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor on the bytes of `frame` from `begin`. Autograd sees no view; it has its own version counter."""
    flat = torch.empty(0, dtype=dtype, device="cpu")
    return flat.set_(frame.untyped_storage(), begin // dtype.itemsize, (math.prod(shape),), (1,)).view(shape)


def nbytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the size of a contiguous tensor in bytes."""
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class Form:
    """A `Form` describes values without their data: each of `leaves` is a tensor's `TensorForm` or a constant.

    `tree` is empty if the values are a plain list of tensors.
    """

    tree: str
    leaves: tuple[Any, ...]

    def encode(self) -> bytes:
        """Return the form as a pickle, which `Wire` authenticates between hosts."""
        return pickle.dumps(self)


class TensorForm(NamedTuple):
    """A `TensorForm` describes a tensor without its data and first dimension; `strides` is None if contiguous."""

    dtype: torch.dtype
    trailing: tuple[int, ...]
    is_scalar: bool
    needs_grad: bool
    strides: Strides | None


_FIXED = 8
_MOST = (WORDS - _FIXED) // 2
_TAG = 1_000_000  # programs use lower tags on the same group
_STAGES, _NUMBERS = 512, 1023  # every edge of every pipeline has its own tags: all fit into 30 bits
_EDGE_TAGS = 4 * _STAGES**2  # each edge has two directions, and messages in frames and outside them
_VALUES, _FAILED, _LOST = 0, 1, 2
_BY_MESSAGE, _ABSENT = -1, -2
_LENT_BYTES = 16 * 1024  # smaller tensors travel in messages
AHEAD = 2
"""The number of receives that are posted in advance, beyond those of the current action.

Two hide the time until the sender learns of a receive; on one host, one is enough. Each receive occupies the memory of
a frame.
"""
_HAS_STATE, _INSIDE = 1, 2
_WORD = 2**31
_CPU = torch.device("cpu")


_Sent = dict[Edge, tuple[Any, list[Any], list[str]]]
_Received = dict[Edge, tuple[Form, Any]]


class PipelineNumbers:
    """`PipelineNumbers` numbers pipelines, so that those with common ranks differ. `next` is free in this process."""

    next = 0

    @classmethod
    def reserve(cls, free: Iterable[int]) -> int:
        """Return and reserve a number that is free on all ranks; `free` has each rank's next free number."""
        number = max(free)
        cls.next = number + 1
        return number


class Wire:
    """A `Wire` is this rank's end of all edges of a pipeline. Sends never wait for receivers; `wait_sent` does."""

    def __init__(self, group: dist.ProcessGroup, rank_of: Sequence[int], device: torch.device, number: int = 0) -> None:
        """Create the wire; `rank_of` maps each stage, and any other end of an edge, to its rank.

        `number` differs between the pipelines of a group, so that messages of a failed pipeline never reach another.
        """
        self._ends = max(_STAGES, len(rank_of))
        self._number = number
        self._tags = _TAG + number % _NUMBERS * _EDGE_TAGS
        self._group = group
        self._rank_of = rank_of
        self._device = device
        self._known: dict[bool, tuple[_Sent, _Received]] = {False: ({}, {}), True: ({}, {})}
        """The last forms sent and received on each edge, in steps without and with a backward."""
        self._sent, self._forms = self._known[True]
        self._works: defaultdict[Edge | None, deque[tuple[int, dist.Work, Tensor]]] = defaultdict(deque)
        """The sends in flight and their micro-batches, in order on each edge; None has tensors sent on no edge."""
        self._frames = FrameLengths()
        self._posted: defaultdict[Edge, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        """The posted receives whose frames have not been read yet, in order on each edge."""
        self._notices: list[tuple[dist.Work, Tensor]] = []
        self._lending: Lending | None = None
        self.posts_ahead = self._may_post_ahead()
        """Whether receives are posted early: only for CPU tensors, and not in shared memory, where it gains nothing."""
        self.sizes: Counter[int] = Counter()
        """The number of large tensors of each size in bytes that were sent by message."""

    @property
    def reduction_tag(self) -> int:
        return self._tags + _EDGE_TAGS - 2

    def _may_post_ahead(self) -> bool:
        return self._device.type == "cpu" and not shares_memory(self._group)

    def begin(self, *, grad: bool) -> None:
        """Begin a step, with a backward or without one."""
        self._frames.begin(grad=grad)
        self._sent, self._forms = self._known[grad]

    def end_step(self) -> None:
        """Record that the step succeeded on all ranks."""
        self._frames.end_step()

    # -- sending -------------------------------------------------------------------------------------------------

    def send_values(self, edge: Edge, values: Sequence[Any], needs_grad: Sequence[bool], step: StepPlan) -> None:
        """Send nested values; `needs_grad` says for each tensor in them whether its gradient is expected."""
        plain = all(isinstance(value, Tensor) for value in values)
        leaves, tree = (values, None) if plain else tree_flatten(list(values))
        wanted = iter(needs_grad)
        described: list[Any] = []
        rows: list[int] = []
        tensors: list[Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                strides = find_strides(leaf)
                described.append(TensorForm(leaf.dtype, tuple(leaf.shape[1:]), leaf.dim() == 0, next(wanted), strides))
                rows.append(0 if leaf.dim() == 0 else leaf.shape[0])
                tensors.append(flatten(leaf, strides))
            else:
                described.append(leaf)
        encoded = b""
        # `==` would not tell 1 from True, or 0.0 from -0.0
        constants = [] if plain else [repr(leaf) for leaf in described if type(leaf) in (bool, int, float)]
        if self._sent.get(edge) != (tree, described, constants):
            self._sent[edge] = (tree, described, constants)
            form = Form("" if tree is None else treespec_dumps(tree), tuple(described))
            pickles, encoded = pickle_authenticator(self._group), form.encode()
            if pickles is not None:
                encoded = pickles.send(encoded, self._stream(edge))
        self._post(edge, step, encoded, rows, tensors)

    def send_gradients(self, edge: Edge, grads: Sequence[Tensor | None], step: StepPlan) -> None:
        """Send the gradients of the values that needed one, in the values' order; None if a gradient is missing."""
        self._post(edge, step, b"", [0] * len(grads), [None if grad is None else flatten(grad, None) for grad in grads])

    def _post(self, edge: Edge, step: StepPlan, form: bytes, rows: list[int], tensors: Sequence[Tensor | None]) -> None:
        if len(tensors) > _MOST:
            raise ValueError(f"at most {_MOST} tensors may be sent from one stage to another, got {len(tensors)}")
        places = [self._place(tensor) for tensor in tensors]
        messages = [
            tensor
            for tensor, place in zip(tensors, places, strict=True)
            if tensor is not None and place == _BY_MESSAGE and tensor.numel()
        ]
        length = needed = HEADER_BYTES
        if self.posts_ahead:
            length, needed = self._frames.length_of(edge), end_of(HEADER_BYTES, [t.nbytes for t in messages])
            self._frames.note(edge, needed)
        inside = length > HEADER_BYTES and needed + aligned(len(form)) <= length
        flags = step.has_state * _HAS_STATE + inside * _INSIDE
        sizes = length * _WORD + min(needed, _WORD - 1)
        header = [_VALUES, len(form), step.micro_batches, step.rows, step.all_rows, step.seed, flags, sizes]
        for count, place in zip(rows, places, strict=True):
            header += [count, place]
        dst, tag = self._rank_of[edge.target], self._tag(edge)
        if inside:
            frame = torch.empty(length // 8, dtype=torch.int64, device="cpu")
            frame[:WORDS] = _words(header)
            at = HEADER_BYTES
            if form:
                tensor_in(frame, at, (len(form),), torch.uint8).copy_(_bytes(form))
                at += aligned(len(form))
            for tensor in messages:
                tensor_in(frame, at, tuple(tensor.shape), tensor.dtype).copy_(tensor)
                at += aligned(tensor.nbytes)
            self._send(edge, step.micro_batch, [frame], dst, tag)
            return
        self._send(edge, step.micro_batch, [_words(header, length)], dst, tag)
        beside = [_bytes(form)] if form else []
        self._send(edge, step.micro_batch, beside + messages, dst, self._tag(edge, beside=True))

    def _place(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return _ABSENT
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < _LENT_BYTES:
            return _BY_MESSAGE
        place = None if self._lending is None else self._lending.lend(tensor)
        if place is None:
            self.sizes[nbytes] += 1
            return _BY_MESSAGE
        return place

    def making(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this thread creates tensors that can be sent without a copy."""
        return contextlib.nullcontext() if self._lending is None else self._lending.making()

    def share(self, most: int) -> None:
        """Send later tensors of the sizes seen so far through shared memory, without a copy. All ranks call it.

        A rank may have `most` tensors of one size at the same time. Nothing happens unless the ranks share memory.
        """
        ours = sharing_group(self._group)
        if self._lending is not None or ours is None:
            return
        sizes: list[Any] = [None] * self._group.size()
        dist.all_gather_object(sizes, set(self.sizes), group=self._group)
        if every := set().union(*sizes):
            from phalanx._comm.backend.lending import Lending  # imports the C core, which such a group has

            with contextlib.suppress(PhalanxError):  # all ranks find no room in the heap: keep using messages
                self._lending = Lending(ours, dict.fromkeys(every, most))

    def _send(self, edge: Edge | None, number: int, parts: Sequence[Tensor], dst: int, tag: int) -> None:
        for part in parts:
            work = self._group.send([part], dst, tag)
            if work is not None and not work.is_completed():
                self._works[edge].append((number, work, part))

    def release_sent(self, edge: Edge, micro_batches: int) -> None:
        """Release the messages of the first `micro_batches` micro-batches, which have been received.

        Some backends do not report a completed send unless a thread waits for it, and keep its memory until then.
        """
        works = self._works.get(edge)
        while works and works[0][0] < micro_batches:
            works.popleft()[1].wait()

    def wait_sent(self) -> None:
        """Wait until the memory of all sent messages may be reused."""
        for edge, works in self._works.items():
            for _, work, _ in works:
                try:
                    work.wait()
                except RuntimeError as error:
                    if edge is not None:
                        with_note(error, f"This error is on the connection to rank {self._rank_of[edge.target]}.")
                    raise
        self._works.clear()

    # -- receiving -----------------------------------------------------------------------------------------------

    def receive_values(self, edge: Edge) -> tuple[list[Any], StepPlan]:
        """Return the next values on an edge; tensors whose gradient the sender expects have `requires_grad` set.

        Raises:
            StageFailedError, StageLostError: the sending stage failed, or lost a peer; the message repeats its error.
            MismatchError: the two ranks have run different steps.
        """
        header, step, parts = self._header(edge)
        if header[1]:
            pickles, encoded = pickle_authenticator(self._group), parts.read_bytes(header[1])
            form: Form = pickle.loads(encoded if pickles is None else pickles.receive(encoded, self._stream(edge)))
            self._forms[edge] = form, treespec_loads(form.tree) if form.tree else None
        form, tree = self._forms[edge]
        words = iter(header[_FIXED:])
        leaves: list[Any] = []
        for leaf in form.leaves:
            if isinstance(leaf, TensorForm):
                rows, place = next(words), next(words)
                shape = leaf.trailing if leaf.is_scalar else (rows, *leaf.trailing)
                flat = self._read(place, shape if leaf.strides is None else (math.prod(shape),), leaf.dtype, parts)
                tensor = restore(flat, shape, leaf.strides)
                leaves.append(tensor.requires_grad_() if leaf.needs_grad else tensor)
            else:
                leaves.append(leaf)
        return leaves if tree is None else tree_unflatten(leaves, tree), step

    def receive_gradients(self, edge: Edge, like: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of `like`, which was sent in the other direction; None for missing ones.

        Raises:
            The errors of `receive_values`.
        """
        header, _, parts = self._header(edge)
        grads: list[Tensor | None] = []
        for at, tensor in enumerate(like):
            place = header[_FIXED + 2 * at + 1]
            absent = place == _ABSENT
            grads.append(None if absent else self._read(place, tuple(tensor.shape), tensor.dtype, parts))
        return grads

    def _read(self, place: int, shape: tuple[int, ...], dtype: torch.dtype, parts: _Parts) -> Tensor:
        if place >= 0:
            assert self._lending is not None
            return self._lending.borrow(parts.src, place, shape, dtype)
        return parts.read(shape, dtype, self._device)

    def post(self, edge: Edge) -> None:
        """Post a receive for the next frame on the edge. The sender always sends one, if need be a failure notice."""
        frame = torch.empty(self._frames.length_of(edge) // 8, dtype=torch.int64, device="cpu")
        work = self._group.recv([frame], self._rank_of[edge.source], self._tag(edge))
        self._posted[edge].append((work, frame))

    def _header(self, edge: Edge) -> tuple[list[int], StepPlan, _Parts]:
        posted = self._posted[edge]
        if not posted:
            self.post(edge)
        work, frame = posted[0]
        work.wait()
        posted.popleft()
        header: list[int] = (frame[:WORDS] if len(frame) > WORDS else frame).tolist()
        src, (length, needed) = self._rank_of[edge.source], divmod(header[7], _WORD)
        parts = _Parts(self, src, self._tag(edge, beside=True), frame if header[6] & _INSIDE else None)
        if header[0] in (_FAILED, _LOST):
            text = parts.read_bytes(header[1]).decode()
            raise StageLostError(text) if header[0] == _LOST else StageFailedError(text)
        if length != 8 * len(frame):
            raise MismatchError(
                f"Pipeline: stage {edge.source} (rank {src}) sends messages of {length} bytes to stage {edge.target}, "
                f"which expects {8 * len(frame)}: the ranks have run different steps."
            )
        if self.posts_ahead:
            self._frames.note(edge, needed)
        step = StepPlan(header[2], header[3], header[4], header[5], bool(header[6] & _HAS_STATE))
        return header, step, parts

    def receive(self, tensor: Tensor, src: int, tag: int) -> Tensor:
        """Fill `tensor` with the next message."""
        self._group.recv([tensor], src, tag).wait()
        return tensor

    def _stream(self, edge: Edge) -> PickleStream:
        """Return the stream of an edge's forms, among the authenticated streams of the group."""
        kind = f"form of Pipeline {self._number} from stage {edge.source} to stage {edge.target}, {edge.backward:d}"
        return PickleStream(kind, self._rank_of[edge.source], self._rank_of[edge.target])

    def _tag(self, edge: Edge, *, beside: bool = False) -> int:
        return self._tags + ((edge.source * self._ends + edge.target) * 2 + edge.backward) * 2 + beside

    # -- between ranks -------------------------------------------------------------------------------------------

    def send_tensor(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor whose form the receiver knows."""
        self._send(None, 0, [flatten(tensor, None)], rank, self._tags + _EDGE_TAGS - 1)

    def receive_tensor(self, tensor: Tensor, rank: int) -> Tensor:
        """Receive into `tensor`, which may have any strides."""
        received = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self.receive(received, rank, self._tags + _EDGE_TAGS - 1)
        return tensor if received is tensor else tensor.copy_(received)

    # -- failing -------------------------------------------------------------------------------------------------

    def notify_failure(
        self, edges: Sequence[Edge], text: str, *, lost: bool, waits: bool, between_steps: bool = False
    ) -> None:
        """Send a failure notice on `edges`, where other ranks wait now or later; ignore edges that fail.

        Arguments:
            lost: a rank is lost; a notified rank raises the same error as if it had detected the loss itself.
            waits: wait up to `LEAVING_S` for the others to receive the notice, because this rank then leaves them.
            between_steps: the step has ended, and the others may be in the next one, with or without a backward.
        """
        data, status = text.encode(), _LOST if lost else _FAILED
        for edge in edges:
            with contextlib.suppress(RuntimeError):  # the receiver of this edge is lost; the next ones may not know
                # Gloo accepts a frame shorter than its receive, but not a longer one.
                self._send_notice(edge, status, data, HEADER_BYTES if between_steps else self._frames.length_of(edge))
        deadline = Deadline.after(LEAVING_S)
        waits = waits and not reduces_early(self._group)  # its `leave` waits instead
        for work, _ in self._notices if waits else ():
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(deadline.left_s, 0.001)))

    def _send_notice(self, edge: Edge, status: int, data: bytes, length: int) -> None:
        """Send a frame for each receive that may be posted there, so that none stays pending; the first is read."""
        inside = HEADER_BYTES + len(data) <= length
        header = [status, len(data), 0, 0, 0, 0, inside * _INSIDE, length * _WORD]
        frame, body = _words(header, length), _bytes(data)
        if inside:
            tensor_in(frame, HEADER_BYTES, (len(data),), torch.uint8).copy_(body)
        dst = self._rank_of[edge.target]
        sends = [(frame, self._tag(edge))] * (1 + AHEAD * self.posts_ahead)
        if not inside:
            sends.insert(1, (body, self._tag(edge, beside=True)))
        for tensor, tag in sends:
            self._notices.append((self._group.send([tensor], dst, tag), tensor))

    def leave(self) -> None:
        """Keep the memory of all messages in flight as long as a Gloo group: they may never be received."""
        sent = [(work, tensor) for works in self._works.values() for _, work, tensor in works]
        posted = [receive for receives in self._posted.values() for receive in receives]
        if reduces_early(self._group):
            keep_messages(self._group, [*sent, *self._notices, *posted])
        self._posted.clear()

    def end_receives(self) -> None:
        """Wait for the posted receives. Call it once every rank has sent its messages or notices."""
        posted = [receive for receives in self._posted.values() for receive in receives]
        self._posted.clear()
        for work, _ in posted:
            with contextlib.suppress(RuntimeError):
                work.wait()


class _Parts:
    """`_Parts` reads the parts of a message in order: from the frame, or each from a message of its own."""

    def __init__(self, wire: Wire, src: int, tag: int, frame: Tensor | None) -> None:
        self.src = src
        self._wire, self._tag, self._frame = wire, tag, frame
        self._at = HEADER_BYTES

    def read(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
        if self._frame is None:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            return self._wire.receive(tensor, self.src, self._tag) if tensor.numel() else tensor
        tensor = tensor_in(self._frame, self._at, shape, dtype)
        self._at += aligned(nbytes_of(shape, dtype))
        return tensor

    def read_bytes(self, count: int) -> bytes:
        return self.read((count,), torch.uint8).numpy().tobytes()


def _words(header: list[int], length: int = HEADER_BYTES) -> Tensor:
    """Return a frame of `length` bytes with this header and nothing else."""
    return torch.frombuffer(array("q", header + [0] * (length // 8 - len(header))), dtype=torch.int64)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
