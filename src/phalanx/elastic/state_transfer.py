"""Transfer one rank's state to others: first the structure as pickled bytes, then the tensors, without pickling.

The state is a list of parts, in the same order on all ranks. A part returns its contents (`get_contents`), and loads
those of another rank's part (`load_contents`). Tensors of the same form are received in place.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx._comm.backend.skeleton import Leaf, join, leaves_of, split
from phalanx.ddp import DistributedDataParallel
from phalanx.elastic.generations import JobEndedError
from phalanx.elastic.tensor_transfer import extended_timeout, transfer_tensors
from phalanx.optim import ZeroRedundancyOptimizer


class StatePart(Protocol):
    """A `StatePart` is a part of the state that can be transferred."""

    def get_contents(self) -> Any:
        """Return the part's contents: tensors and picklable values, in dicts, lists and tuples."""

    def load_contents(self, value: Any) -> None: ...


class ModulePart:
    """`ModulePart` transfers a module's parameters by name, and with `buffers` its buffers.

    It also transfers what the wrappers in the module have decided (for `sync_batchnorm="auto"`), and `requires_grad`.
    """

    def __init__(self, module: nn.Module, *, buffers: bool, without: frozenset[int] = frozenset()) -> None:
        self._module = module
        self._buffers = buffers
        self._without = without  # the ids of parameters that all ranks share in memory

    def get_contents(self) -> Any:
        """Return the tensors themselves: the receiver receives into them."""
        return {
            "decided": [one.batchnorm_choice for one in self._wrappers()],
            "trains": {name: p.requires_grad for name, p in self._module.named_parameters()},
            "tensors": {name: tensor.data for name, tensor in self._named()},
        }

    def load_contents(self, value: Any) -> None:
        """Load received contents. Tensors are in place already, unless their strides or device differed.

        Raises:
            JobEndedError: the sender's module has parameters that this module lacks, or parameters of other shapes.
        """
        for wrapper, choice in zip(self._wrappers(), value["decided"], strict=False):
            wrapper.follow_batchnorm_choice(choice)
        mine, theirs = dict(self._named()), value["tensors"]
        for name in mine.keys() | theirs.keys():
            forms = [(tuple(t.shape), t.dtype) if t is not None else None for t in (mine.get(name), theirs.get(name))]
            if forms[0] != forms[1]:
                raise JobEndedError(
                    f"{name!r} of a {type(self._module).__name__} is {_describe(forms[1])} on the rank that holds the "
                    f"state and {_describe(forms[0])} here: parameters that the loop adds, removes or reshapes cannot "
                    "be restored. Create all parameters before elastic.State, with the shapes of the loaded checkpoint"
                )
        for name, tensor in mine.items():
            if tensor.data_ptr() != theirs[name].data_ptr():
                tensor.data.copy_(theirs[name])
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(value["trains"][name])

    def _named(self) -> list[tuple[str, Tensor]]:
        named: list[tuple[str, Tensor]] = [
            (name, p) for name, p in self._module.named_parameters() if id(p) not in self._without
        ]
        return named + (list(self._module.named_buffers()) if self._buffers else [])

    def _wrappers(self) -> list[DistributedDataParallel]:
        return [layer for layer in self._module.modules() if isinstance(layer, DistributedDataParallel)]


def _describe(form: Any) -> str:
    return "missing" if form is None else f"{form[1]} of shape {list(form[0])}"


class OptimizerPart:
    """`OptimizerPart` transfers an optimizer's groups and its state, by parameter number or by other keys.

    Unlike `load_state_dict`, this casts no tensor. A group that the loop has added is matched by the names that its
    parameters have in `models`.
    """

    def __init__(self, optimizer: Optimizer, models: Mapping[str, nn.Module]) -> None:
        self._optimizer = optimizer
        self._models = models
        self._names: dict[Tensor, str] = {}

    def get_contents(self) -> Any:
        """Return the options of each group, the names of its parameters, and the state."""
        groups = [{**_options(group), "params": self._named(group)} for group in self._optimizer.param_groups]
        parameters = self._parameters()
        known = {id(p) for p in parameters}
        return {
            "groups": groups,
            "state": [dict(self._optimizer.state.get(p, {})) for p in parameters],
            "other": {key: one for key, one in self._optimizer.state.items() if id(key) not in known},
        }

    def load_contents(self, value: Any) -> None:
        """Set groups, options and state.

        Raises:
            JobEndedError: a group has parameters of no model in State, or a tensor outside all groups has a state.
        """
        optimizer = self._optimizer
        if any(isinstance(key, Tensor) for key in value["other"]):
            raise JobEndedError(
                f"{type(optimizer).__name__} has the state of a tensor that is in none of its groups, so other ranks "
                "cannot identify it. Add the tensor to a group, or delete its state"
            )
        by_name: dict[str, Tensor] = {}
        for number, group in enumerate(value["groups"]):
            if number < len(optimizer.param_groups) and self._named(optimizer.param_groups[number]) == group["params"]:
                continue
            by_name = by_name or self._by_name()
            if missing := [name for name in group["params"] if name not in by_name]:
                raise JobEndedError(
                    f"group {number} of {type(optimizer).__name__} has a parameter ({missing[0] or 'without a name'}) "
                    "that no model in State has: pass State the model of every group that the loop adds"
                )
            params = [by_name[name] for name in group["params"]]
            if number < len(optimizer.param_groups):
                optimizer.param_groups[number]["params"] = params
            else:
                optimizer.add_param_group({**group, "params": params})
        del optimizer.param_groups[len(value["groups"]) :]
        for mine, theirs in zip(optimizer.param_groups, value["groups"], strict=True):
            params = mine["params"]
            mine.clear()
            mine.update({"params": params, **_options(theirs)})
        optimizer.state.clear()
        optimizer.state.update({p: s for p, s in zip(self._parameters(), value["state"], strict=True) if s})
        optimizer.state.update(value["other"])

    def _named(self, group: dict[str, Any]) -> list[str]:
        if any(p not in self._names for p in group["params"]):
            self._names = {p: name for name, p in self._by_name().items()}
            for p in group["params"]:
                self._names.setdefault(p, "")
        return [self._names[p] for p in group["params"]]

    def _by_name(self) -> dict[str, Tensor]:
        return {f"{thing}.{name}": p for thing, one in self._models.items() for name, p in one.named_parameters()}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


class ShardedPart:
    """`ShardedPart` transfers a sharded optimizer's options and its whole `state`, which is None on a receiver."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer, state: Any) -> None:
        self._optimizer = optimizer
        self._state = state

    def get_contents(self) -> Any:
        """Return the options of each group, and the state by parameter number."""
        return {"groups": [_options(group) for group in self._optimizer.param_groups], "state": self._state}

    def load_contents(self, value: Any) -> None:
        """Set the options, and this rank's shard of the state.

        Raises:
            JobEndedError: the state was not backed up, or the numbers of groups differ.
        """
        _require_groups(self._optimizer, value["groups"])
        for mine, theirs in zip(self._optimizer.param_groups, value["groups"], strict=True):
            mine.update(theirs)
        if value["state"] is None:
            raise JobEndedError(
                "the state of a ZeroRedundancyOptimizer on the lost ranks was too large to be backed up. Start again "
                "from the last checkpoint"
            )
        self._optimizer.load_state_backup(value["state"])


def _require_groups(optimizer: ZeroRedundancyOptimizer, groups: Sequence[Any]) -> None:
    if len(optimizer.param_groups) != len(groups):
        raise JobEndedError(
            f"a ZeroRedundancyOptimizer has {len(groups)} groups of parameters on the rank that holds the state and "
            f"{len(optimizer.param_groups)} here: groups that the loop adds cannot be restored. Add them before "
            "elastic.State"
        )


class StatefulPart:
    """`StatefulPart` transfers any object with `state_dict` and `load_state_dict`."""

    def __init__(self, owner: Any, *, is_large: bool = False) -> None:
        self._owner = owner
        self.is_large = is_large

    def get_contents(self) -> Any:
        return self._owner.state_dict()

    def load_contents(self, value: Any) -> None:
        self._owner.load_state_dict(value)


class ValuePart:
    """`ValuePart` transfers plain values through a getter and a setter."""

    def __init__(self, get_value: Callable[[], Any], set_value: Callable[[Any], None]) -> None:
        self._get, self._set = get_value, set_value

    def get_contents(self) -> Any:
        return self._get()

    def load_contents(self, value: Any) -> None:
        self._set(value)


def transfer_state(parts: Sequence[StatePart], source: int, receivers: Sequence[int], group: Any) -> int:
    """Copy the contents of `source`'s parts to those of the `receivers`. All ranks call this.

    Return how many bytes of tensors each receiver gets; 0 on a rank that takes no part.

    Cost: one broadcast of the structure to all; the tensors go to receivers only, within a host by one copy
    (`phalanx.elastic.tensor_transfer`). All ranks wait until the tensors have arrived; the timeout grows with their
    size.
    """
    me = group.rank()
    mine: list[list[Tensor]] = [[] for _ in parts]
    takes_part = me == source or me in receivers
    structures = [
        split(part.get_contents(), tensors) if takes_part else None for part, tensors in zip(parts, mine, strict=True)
    ]
    gathered = [pickle.dumps(structures) if me == source else None]
    dist.broadcast_object_list(gathered, group=group, group_src=source)
    theirs = pickle.loads(gathered[0])  # type: ignore[arg-type]  # bytes, once it was received
    leaves = [leaves_of(structure) for structure in theirs]
    if me in receivers:
        devices = devices_here(leaves, mine)
        mine = [_places(forms, tensors, devices) for forms, tensors in zip(leaves, mine, strict=True)]
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for forms in leaves for leaf in forms)
    with extended_timeout(group, nbytes):
        transfer_tensors([tensor for tensors in mine for tensor in tensors], source, receivers, group)
    if me in receivers:
        for part, structure, tensors in zip(parts, theirs, mine, strict=True):
            part.load_contents(join(structure, tensors))
    return nbytes if takes_part else 0


def devices_here(leaves: Sequence[Sequence[Leaf]], mine: Sequence[Sequence[Tensor]]) -> dict[str, str]:
    """Map each of the source's devices to this rank's device that holds the same tensors.

    Parts that are still empty on this rank (an optimizer's state) are skipped; the parameters determine the device.
    """
    return {
        leaf.device: str(own.device)
        for forms, tensors in zip(leaves, mine, strict=True)
        if len(forms) == len(tensors)
        for leaf, own in zip(forms, tensors, strict=True)
        if torch.device(leaf.device).type == own.device.type
    }


def _places(leaves: Sequence[Leaf], mine: Sequence[Tensor], devices: Mapping[str, str]) -> list[Tensor]:
    """Return the tensors to receive into: this rank's own where they have the forms of the source's, else new ones."""
    places = []
    for leaf in leaves:
        own = mine[leaf.index] if len(mine) == len(leaves) else None
        device = devices.get(leaf.device, leaf.device)
        if own is None or _form(own) != (leaf.shape, leaf.stride, leaf.dtype, device):
            own = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=device)
        places.append(own)
    return places


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device)
