"""One rank's state, made another's: the tensors go from memory to memory, the rest as a few pickled bytes before them.

What is handed over is a list of parts, in an order that is the same on all ranks. A part says what it holds (`show`),
and takes what another rank's part held (`take`). Tensors that fit are received where they lie.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.backend.skeleton import Leaf, join, split
from phalanx.elastic.carry import carry, own_clock
from phalanx.optim import ZeroRedundancyOptimizer


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

    Cost: one broadcast of the structure to all; the tensors go to receivers alone (`phalanx.elastic.carry`), on a host
    by one copy. All ranks wait until they have arrived, for as long as so many bytes may take.
    """
    me = group.rank()
    mine: list[list[Tensor]] = [[] for _ in parts]
    shows = me == source or me in receivers
    structures = [split(part.show(), tensors) if shows else None for part, tensors in zip(parts, mine, strict=True)]
    told = [pickle.dumps(structures) if me == source else None]
    dist.broadcast_object_list(told, group=group, group_src=source)
    theirs = pickle.loads(told[0])  # type: ignore[arg-type]  # bytes, once it was received
    leaves = [_collect(structure) for structure in theirs]
    if me in receivers:
        mine = [_places(forms, tensors) for forms, tensors in zip(leaves, mine, strict=True)]
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for forms in leaves for leaf in forms)
    with own_clock(group, nbytes):
        carry([tensor for tensors in mine for tensor in tensors], source, receivers, group)
    if me in receivers:
        for part, structure, tensors in zip(parts, theirs, mine, strict=True):
            part.take(join(structure, tensors))
    return nbytes if shows else 0


def _collect(structure: Any) -> list[Leaf]:
    """The leaves of a structure, in the order of its tensors."""
    if isinstance(structure, Leaf):
        return [structure]
    if isinstance(structure, dict):
        return [leaf for one in structure.values() for leaf in _collect(one)]
    return [leaf for one in structure for leaf in _collect(one)] if type(structure) in (list, tuple) else []


def _places(leaves: Sequence[Leaf], mine: Sequence[Tensor]) -> list[Tensor]:
    """Where to receive: this rank's own tensors, as long as they have the forms of the source's, in its order."""
    places = []
    for leaf in leaves:
        own = mine[leaf.index] if len(mine) == len(leaves) else None
        if own is None or _form(own) != (leaf.shape, leaf.stride, leaf.dtype, leaf.device):
            own = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)
        places.append(own)
    return places


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device)
