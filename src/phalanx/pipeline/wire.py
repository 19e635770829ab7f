"""What goes from stage to stage: values forward, their gradients backward, and the news that a stage failed.

A message is a header of fixed size, then what it announces. Where the header says that a tensor lies in memory that
both map, nothing follows. The form of the values (how they nest, their dtypes and all dimensions but the first) is sent
only when it is another than the last time on the same edge.

    header   status | bytes of the form | of the step: micro-batches, rows of this one, rows of all, seed, has_state
             | (rows, place) of each tensor
"""

from __future__ import annotations

import contextlib
import pickle
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from phalanx.backend.shared import shares_memory
from phalanx.deadline import Deadline
from phalanx.errors import PeerLostError, PhalanxError

if TYPE_CHECKING:
    from phalanx.backend.lending import Lending

_WORDS = 64
_FIXED = 7
_MOST = (_WORDS - _FIXED) // 2
_TAG = 1_000_000  # above what programs use on the same group
_STAGES, _NUMBERS = 512, 2048  # stages and ranks, and pipelines, with tags of their own: all fit into 31 bits
_VALUES, _FAILED, _LOST = 0, 1, 2
_BY_MESSAGE, _ABSENT = -1, -2
_LENT_BYTES = 16 * 1024  # tensors below travel in messages
_FAREWELL_S = 5.0


class Edge(NamedTuple):
    """Messages from one stage to another; `backward` if they are gradients. Each has its own order."""

    source: int
    target: int
    backward: bool = False


class Step(NamedTuple):
    """What all stages must know of a step: its micro-batches, the rows of this one and of all.

    `seed`: that of this micro-batch. `has_state`: some stage has drawn numbers; then the first of the values is the
    state of the generators after that. `micro_batch`: its number, which the sender alone knows.
    """

    micro_batches: int
    rows: int
    all_rows: int
    seed: int = 0
    has_state: bool = False
    micro_batch: int = 0


class StageFailedError(PhalanxError):
    """Another stage failed, and told."""


class StageLostError(PeerLostError):
    """Another stage has lost a peer, and told."""


@dataclass(frozen=True)
class _Form:
    """Values without their data: `leaves` has (dtype, dimensions after the first, needs a gradient) or a constant.

    `tree` is empty if the values are the leaves.
    """

    tree: str
    leaves: tuple[Any, ...]

    def encode(self) -> bytes:
        return pickle.dumps(self)


class _Array(NamedTuple):
    dtype: torch.dtype
    trailing: tuple[int, ...]
    is_scalar: bool
    needs_grad: bool


class Wire:
    """This rank's end of all edges of a pipeline. Sends never wait for the receiver; `settle` does, at the end."""

    def __init__(self, group: dist.ProcessGroup, rank_of: Sequence[int], device: torch.device, number: int = 0) -> None:
        """`rank_of`: who has each stage; the numbers after those of stages are further ends of edges, as the ranks'.

        `number`: another for each pipeline of a group, so that what one that failed has left is no other's message.
        """
        self._ends = max(_STAGES, len(rank_of))
        self._tags = _TAG + number % _NUMBERS * 2 * _STAGES**2
        self._group = group
        self._rank_of = rank_of
        self._device = device
        self._sent: dict[Edge, tuple[Any, list[Any]]] = {}
        self._forms: dict[Edge, tuple[_Form, Any]] = {}
        self._works: defaultdict[Edge | None, deque[tuple[int, dist.Work, Tensor]]] = defaultdict(deque)
        """What is on the way, with the micro-batch, in order on each edge; of tensors without one under None."""
        self._farewells: list[tuple[dist.Work, Tensor]] = []
        self._lending: Lending | None = None
        self.sizes: Counter[int] = Counter()
        """How often a tensor of so many bytes went by message, though it is large."""

    def regroup(self, group: dist.ProcessGroup) -> None:
        """Go on in another group, as one who has sent and learnt nothing. Works of the old one are over, or failed."""
        self._group = group
        self._sent, self._forms = {}, {}
        self._works.clear()
        self._lending = None  # tensors over its memory keep that
        self.sizes = Counter()

    # -- sending -------------------------------------------------------------------------------------------------

    def send_values(self, edge: Edge, values: Sequence[Any], needs_grad: Sequence[bool], step: Step) -> None:
        """Send nested values; `needs_grad` says for each tensor in them whether its gradient is wanted back."""
        plain = all(isinstance(value, Tensor) for value in values)
        leaves, tree = (values, None) if plain else tree_flatten(list(values))
        wanted = iter(needs_grad)
        described: list[Any] = []
        tensors: list[Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                described.append(_Array(leaf.dtype, tuple(leaf.shape[1:]), leaf.dim() == 0, next(wanted)))
                tensors.append(leaf)
            else:
                described.append(leaf)
        news = b""
        if self._sent.get(edge) != (tree, described):
            self._sent[edge] = (tree, described)
            news = _Form("" if tree is None else treespec_dumps(tree), tuple(described)).encode()
        rows = [0 if t.dim() == 0 else t.shape[0] for t in tensors]
        self._post(edge, step, news, rows, tensors)

    def send_gradients(self, edge: Edge, grads: Sequence[Tensor | None], step: Step) -> None:
        """Send gradients of the values that needed one, in their order; None for one that has none."""
        self._post(edge, step, b"", [0] * len(grads), grads)

    def _post(self, edge: Edge, step: Step, news: bytes, rows: list[int], tensors: Sequence[Tensor | None]) -> None:
        header = [_VALUES, len(news), step.micro_batches, step.rows, step.all_rows, step.seed, int(step.has_state)]
        places = [self._place(tensor) for tensor in tensors]
        for count, place in zip(rows, places, strict=True):
            header += [count, place]
        size = max(_WORDS, -(-len(header) // _WORDS) * _WORDS)
        dst, tag = self._rank_of[edge.target], self._tag(edge)
        if size > _WORDS:
            raise ValueError(f"at most {_MOST} tensors may go from a stage to another, got {len(tensors)}")
        parts = [_words(header)]
        if news:
            parts.append(torch.frombuffer(bytearray(news), dtype=torch.uint8))
        for tensor, place in zip(tensors, places, strict=True):
            if tensor is not None and place == _BY_MESSAGE and tensor.numel():
                parts.append(tensor.detach().contiguous())
        self._send(edge, step.micro_batch, parts, dst, tag)

    def _place(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return _ABSENT
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < _LENT_BYTES:
            return _BY_MESSAGE
        place = None if self._lending is None else self._lending.lend(tensor.detach())
        if place is None:
            self.sizes[nbytes] += 1
            return _BY_MESSAGE
        return place

    def making(self) -> contextlib.AbstractContextManager[None]:
        """Tensors that this thread makes meanwhile may be sent without a copy."""
        return contextlib.nullcontext() if self._lending is None else self._lending.making()

    def share(self, most: int) -> None:
        """From now on, tensors of the sizes that were sent so far stay where they are, and are read there. Collective.

        `most`: how many of a size a rank may have at the same time. Nothing happens where ranks share no memory.
        """
        if self._lending is not None or not shares_memory(self._group):
            return
        sizes: list[Any] = [None] * self._group.size()
        dist.all_gather_object(sizes, set(self.sizes), group=self._group)
        if every := set().union(*sizes):
            from phalanx.backend.lending import Lending  # needs the C core, which a group that shares memory has

            with contextlib.suppress(PhalanxError):  # no room in the heap, on all ranks: messages it is
                self._lending = Lending(self._group, dict.fromkeys(every, most))

    def _send(self, edge: Edge | None, number: int, parts: Sequence[Tensor], dst: int, tag: int) -> None:
        for part in parts:
            work = self._group.send([part], dst, tag)
            if work is not None and not work.is_completed():
                self._works[edge].append((number, work, part))

    def let_go(self, edge: Edge, micro_batches: int) -> None:
        """The messages of so many micro-batches have been received: what they sent is needed no more.

        Some backends do not tell when a send is over unless somebody waits, and keep its memory until then.
        """
        works = self._works.get(edge)
        while works and works[0][0] < micro_batches:
            works.popleft()[1].wait()

    def settle(self) -> None:
        """Return when all that was sent has left its memory."""
        sent = list(self._works.values())
        self._works.clear()
        for works in sent:
            for _, work, _ in works:
                work.wait()

    # -- receiving -----------------------------------------------------------------------------------------------

    def receive_values(self, edge: Edge) -> tuple[list[Any], Step]:
        """The next values on an edge; tensors whose gradient is wanted back require it.

        Raises:
            StageFailedError, StageLostError: the stage there failed, or lost a peer; the message is its own.
        """
        header, step, src, tag = self._header(edge)
        if header[1]:
            form: _Form = pickle.loads(
                self._receive(torch.empty(header[1], dtype=torch.uint8), src, tag).numpy().tobytes()
            )
            self._forms[edge] = form, treespec_loads(form.tree) if form.tree else None
        form, tree = self._forms[edge]
        words = iter(header[_FIXED:])
        leaves: list[Any] = []
        for leaf in form.leaves:
            if isinstance(leaf, _Array):
                rows, place = next(words), next(words)
                shape = leaf.trailing if leaf.is_scalar else (rows, *leaf.trailing)
                tensor = self._take(place, shape, leaf.dtype, src, tag)
                leaves.append(tensor.requires_grad_() if leaf.needs_grad else tensor)
            else:
                leaves.append(leaf)
        return leaves if tree is None else tree_unflatten(leaves, tree), step

    def receive_gradients(self, edge: Edge, like: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of `like`, which were sent the other way; None where there is none.

        Raises:
            StageFailedError: the stage there failed; the message is its own.
        """
        header, _, src, tag = self._header(edge)
        grads: list[Tensor | None] = []
        for at, tensor in enumerate(like):
            place = header[_FIXED + 2 * at + 1]
            absent = place == _ABSENT
            grads.append(None if absent else self._take(place, tuple(tensor.shape), tensor.dtype, src, tag))
        return grads

    def _take(self, place: int, shape: tuple[int, ...], dtype: torch.dtype, src: int, tag: int) -> Tensor:
        if place >= 0:
            assert self._lending is not None
            return self._lending.borrow(src, place, shape, dtype)
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return self._receive(tensor, src, tag) if tensor.numel() else tensor

    def _header(self, edge: Edge) -> tuple[list[int], Step, int, int]:
        src, tag = self._rank_of[edge.source], self._tag(edge)
        header: list[int] = self._receive(torch.empty(_WORDS, dtype=torch.int64), src, tag).tolist()
        if header[0] in (_FAILED, _LOST):
            text = self._receive(torch.empty(header[1], dtype=torch.uint8), src, tag).numpy().tobytes().decode()
            raise StageLostError(text) if header[0] == _LOST else StageFailedError(text)
        return header, Step(header[2], header[3], header[4], header[5], bool(header[6])), src, tag

    def _receive(self, tensor: Tensor, src: int, tag: int) -> Tensor:
        self._group.recv([tensor], src, tag).wait()
        return tensor

    def _tag(self, edge: Edge) -> int:
        return self._tags + (edge.source * self._ends + edge.target) * 2 + edge.backward

    def edges_to_ranks(self, source: int, num_stages: int, own: int) -> list[Edge]:
        """From a stage to each other rank, as the numbers after those of stages name them."""
        return [Edge(source, at) for at in range(num_stages, len(self._rank_of)) if at != num_stages + own]

    # -- between ranks -------------------------------------------------------------------------------------------

    def send_tensor(self, tensor: Tensor, rank: int) -> None:
        """A tensor whose form the other rank knows."""
        self._send(None, 0, [tensor.detach().contiguous()], rank, self._tags + 2 * _STAGES**2 - 1)

    def receive_tensor(self, tensor: Tensor, rank: int) -> Tensor:
        """Fill `tensor` with what that rank sends."""
        return self._receive(tensor, rank, self._tags + 2 * _STAGES**2 - 1)

    # -- failing -------------------------------------------------------------------------------------------------

    def tell_failure(self, edges: Sequence[Edge], text: str, *, lost: bool, leaves: bool) -> None:
        """Put the news on edges, for whoever waits there, or comes there next. What fails here is not told.

        `lost`: it is a rank that is gone; who hears of it shall raise what they would if they had seen it themselves.
        `leaves`: this rank will not meet the others any more, so it waits a little for them to hear it.
        """
        data = text.encode()
        header = _words([_LOST if lost else _FAILED, len(data)])
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            for edge in edges:
                for tensor in (header, body):
                    work = self._group.send([tensor], self._rank_of[edge.target], self._tag(edge))
                    self._farewells.append((work, tensor))
            deadline = Deadline.after(_FAREWELL_S)
            for work, _ in self._farewells if leaves else ():  # where nobody comes for it, Gloo breaks the connection
                work.wait(timedelta(seconds=max(deadline.left_s, 0.001)))
        except RuntimeError:  # a peer is gone, which the others hear anyway
            pass


def _words(header: list[int]) -> Tensor:
    """A header of its fixed size."""
    return torch.frombuffer(array("q", header + [0] * (_WORDS - len(header))), dtype=torch.int64)
