"""One rank's state, made another's: the tensors go from memory to memory, the rest as a few pickled bytes before them.

What is handed over is a list of parts, in an order that is the same on all ranks. A part says what it holds (`show`),
and takes what another rank's part held (`take`). Tensors that fit are received where they lie.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.backend.skeleton import Leaf, join, split
from phalanx.optim import ZeroRedundancyOptimizer
from phalanx.transport.tensors import is_dense

_SMALL = 1 << 16  # tensors below this are packed; the others travel as they are
_ALIGN = 64
_HUGE = 1 << 21


class Part(Protocol):
    """Something that can be handed over."""

    def show(self) -> Any:
        """What it holds: tensors, and what can be pickled, in dicts, lists and tuples."""
        ...

    def take(self, value: Any) -> None:
        """Hold that."""
        ...


class ModulePart:
    """Parameters, and those buffers that no rank's record holds."""

    def __init__(self, module: nn.Module, *, buffers: bool, without: frozenset[int] = frozenset()) -> None:
        self._module = module
        self._buffers = buffers
        self._without = without  # parameters, by id, that all ranks have in one memory

    def show(self) -> list[Tensor]:
        """The tensors themselves: who takes, receives into them."""
        tensors = [p.data for p in self._module.parameters() if id(p) not in self._without]
        return tensors + ([b.data for b in self._module.buffers()] if self._buffers else [])

    def take(self, value: Any) -> None:
        """What was received lies in place, unless it had another form."""
        for mine, theirs in zip(self.show(), value, strict=True):
            if mine is not theirs and mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)


class OptimizerPart:
    """Options and state, by the number of the parameter; tensors as they are, so that no bit is converted."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def show(self) -> Any:
        """Options of each group, and the state of each parameter that has one."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        return {"groups": groups, "state": [dict(self._optimizer.state.get(p, {})) for p in self._parameters()]}

    def take(self, value: Any) -> None:
        """Set both."""
        for mine, theirs in zip(self._optimizer.param_groups, value["groups"], strict=True):
            mine.update(theirs)
        for parameter, state in zip(self._parameters(), value["state"], strict=True):
            if state:
                self._optimizer.state[parameter] = state
            else:
                self._optimizer.state.pop(parameter, None)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


class ShardedPart:
    """Options, and the whole state of an optimizer of which each rank has a part. `state` is None on who receives."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer, state: Any) -> None:
        self._optimizer = optimizer
        self._state = state

    def show(self) -> Any:
        """Options of each group, and the state by the number of the parameter."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        return {"groups": groups, "state": self._state}

    def take(self, value: Any) -> None:
        """Set the options, and this rank's part of the state."""
        for mine, theirs in zip(self._optimizer.param_groups, value["groups"], strict=True):
            mine.update(theirs)
        self._optimizer.load_kept_state(value["state"])


class SlicesPart:
    """Options of an optimizer that is shared with other ranks, and this rank's slices of its state, cut as they are."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def show(self) -> Any:
        """Options of each group, and the state of each slice by the number of the parameter."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        return {"groups": groups, "state": self._optimizer.shard_state_dict()["state"]}

    def take(self, value: Any) -> None:
        """Set both."""
        for mine, theirs in zip(self._optimizer.param_groups, value["groups"], strict=True):
            mine.update(theirs)
        self._optimizer.load_shard(value["state"])


class StatefulPart:
    """Whatever has `state_dict` and `load_state_dict`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def show(self) -> Any:
        """Its state."""
        return self._owner.state_dict()

    def take(self, value: Any) -> None:
        """Load it."""
        self._owner.load_state_dict(value)


class ValuePart:
    """Plain values, read and written by functions."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self._get, self._put = get, put

    def show(self) -> Any:
        """The value."""
        return self._get()

    def take(self, value: Any) -> None:
        """Set it."""
        self._put(value)


def hand_over(parts: Sequence[Part], source: int, receivers: Sequence[int], group: Any) -> int:
    """Make `source`'s parts those of `receivers`; the bytes that went to each. Collective over the group.

    Cost: one broadcast of the structure to all; to one receiver, tensors go straight to it; to several they are
    broadcast, over everybody's own, which hold the same bits.
    """
    me = group.rank()
    mine: list[Tensor] = []
    shown = [part.show() for part in parts]
    structure = split(shown, mine)
    told = [pickle.dumps(structure) if me == source else None]
    dist.broadcast_object_list(told, group=group, group_src=source)
    takes_part = len(receivers) > 1 or me in (source, *receivers)
    if not takes_part:
        return 0
    theirs = pickle.loads(told[0])  # type: ignore[arg-type]  # bytes, once it was received
    leaves: list[Leaf] = []
    _collect(theirs, leaves)
    tensors = mine if me == source else _places(leaves, mine)
    if len(receivers) > 1:
        _transfer(tensors, group, lambda t: dist.broadcast(t, group=group, group_src=source), sends=me == source)
    elif me == source:
        _transfer(tensors, group, lambda t: dist.send(t, group=group, group_dst=receivers[0]), sends=True)
    else:
        _transfer(tensors, group, lambda t: dist.recv(t, group=group, group_src=source), sends=False)
    if me in receivers:
        for part, value in zip(parts, join(theirs, tensors), strict=True):
            part.take(value)
    return sum(t.nbytes for t in tensors)


def _collect(structure: Any, leaves: list[Leaf]) -> None:
    if isinstance(structure, Leaf):
        leaves.append(structure)
    elif isinstance(structure, dict):
        for one in structure.values():
            _collect(one, leaves)
    elif type(structure) in (list, tuple):
        for one in structure:
            _collect(one, leaves)


def _places(leaves: Sequence[Leaf], mine: Sequence[Tensor]) -> list[Tensor]:
    """Where to receive: this rank's own tensors, as long as they have the forms of the source's, in its order."""
    places = []
    for leaf in leaves:
        own = mine[leaf.index] if len(mine) == len(leaves) else None
        if own is None or _form(own) != (leaf.shape, leaf.stride, leaf.dtype, leaf.device):
            own = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)
            _ask_for_huge_pages(own)
        places.append(own)
    return places


def _ask_for_huge_pages(tensor: Tensor) -> None:
    """New memory costs more than what is copied there: 4 KiB a fault, a third of memcpy's speed; 2 MiB, two thirds."""
    if tensor.device.type != "cpu" or tensor.nbytes < 2 * _HUGE:
        return
    start = -(-tensor.data_ptr() // _HUGE) * _HUGE
    nbytes = (tensor.data_ptr() + tensor.nbytes - start) // _HUGE * _HUGE
    # Only asked: without huge pages (EINVAL) they are small ones, as ever.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device)


def _transfer(tensors: Sequence[Tensor], group: Any, move: Callable[[Tensor], Any], *, sends: bool) -> None:
    """Move large tensors one by one, and all others as one message. Forms, which decide, are the same on both sides."""
    small = []
    for tensor in tensors:
        if tensor.nbytes >= _SMALL and is_dense(tensor):
            move(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8))
        elif tensor.nbytes:
            small.append(tensor)
    if not small:
        return
    starts = [0, *itertools.accumulate(-(-t.nbytes // _ALIGN) * _ALIGN for t in small)]
    message = torch.empty(starts[-1], dtype=torch.uint8)
    places = [
        message[start : start + t.nbytes].view(t.dtype).view(t.shape) for start, t in zip(starts, small, strict=False)
    ]
    if sends:
        for place, tensor in zip(places, small, strict=True):
            place.copy_(tensor)
    move(message)
    if not sends:
        for place, tensor in zip(places, small, strict=True):
            tensor.copy_(place)
