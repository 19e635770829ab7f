"""`StageModule` is a module with one rank's stages that keeps the parameter names of the whole model."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._base.param_groups import options_of
from phalanx._base.partition.owners import Layout, register, whole_name
from phalanx._base.partition.parts import LayerRange
from phalanx._base.torch_names import find
from phalanx._comm.transport.memory_order import Strides, find_strides, flatten, restore
from phalanx.pipeline.whole_optimizer import (
    ParamGroup,
    describe_groups,
    fit,
    merge_groups,
    number_names,
)
from phalanx.pipeline.whole_optimizer import whole_names as names_of

_IncompatibleKeys: Any = find(
    "torch.nn.modules.module._IncompatibleKeys",
    loses="load_state_dict of a Pipeline returns a plain tuple",
    instead=lambda missing, unexpected: (missing, unexpected),
)

if TYPE_CHECKING:
    from typing_extensions import Self


class StageModule(nn.Module):
    """A `StageModule` looks like the whole model without the parameters, buffers and modules of other ranks."""

    _own: OwnModules
    _no_parameter: nn.Parameter

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Record the names of `module`, the whole model; `_set_own` adds this rank's part later."""
        super().__init__()
        self.training = module.training
        self._group = group
        whole: Any = module.state_dict()
        self._state_names, self._metadata = list(whole), whole._metadata
        self._first_state_names = first_names(module)
        self._model_name = type(module).__name__
        first = {id(p): name for name, p in module.named_parameters()}
        self._first_names = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        self._places = {name: at for at, name in enumerate(first.values())}
        self._without_values: list[str] = []
        self._data_group: dist.ProcessGroup | None = None
        # Optimizers refuse an empty list of parameters, so a rank without parameters yields this one. It is not
        # registered in the module.
        object.__setattr__(self, "_no_parameter", nn.Parameter(torch.empty(0, device="cpu")))

    def _set_own(self, own: OwnModules) -> None:
        object.__setattr__(self, "_own", own)  # not a child, whose names would begin with "_own"
        for name, parameter in self.named_parameters():
            register(name, parameter, self)
        register("", self._no_parameter, self)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages, with their names in the whole model."""
        found = self._own.named_parameters("", recurse, remove_duplicate)
        named = {self._first_names[name] if remove_duplicate else name: parameter for name, parameter in found}
        for name in self._first_names:  # in the order of the whole model
            if name in named:
                yield prefix + "." * bool(prefix) + name, named[name]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages; if there are none, an empty placeholder for the optimizer."""
        found = [parameter for _, parameter in self.named_parameters(recurse=recurse)]
        yield from found or [self._no_parameter]

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this rank's stages, with their names in the whole model.

        Shape: as in the whole model.
        """
        yield from self._own.named_buffers(prefix, recurse, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the children in this rank's stages, with their names in the whole model."""
        yield from self._own.named_children()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules in this rank's stages, with their names in the whole model."""
        yield from self._own.named_modules(memo, prefix, remove_duplicate)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        first = next(itertools.chain(self._own.parameters(), self._own.buffers()), None)
        if first is not None and fn(first.detach().new_empty(0)).device != first.device:
            raise ValueError(
                "Pipeline.to changes only the dtype: the device of the stages and of their messages was set when the "
                "Pipeline was constructed. Pass device= there"
            )
        cast("Any", self._own)._apply(fn, recurse)
        return self

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False, rank0_only: bool = False
    ) -> Any:
        """Return the state of the whole model, as it would be without a pipeline. All ranks of the group call it.

        With `rank0_only`, only the first rank gets the whole state, and every other rank its own part.
        """
        own = self._own_state(keep_vars=keep_vars)
        whole = gather_state(own, self._state_names, self._group, rank0_only=rank0_only)
        if destination is None:
            destination = whole
            destination._metadata = self._metadata
        else:
            destination.update({prefix + name: value for name, value in whole.items()})
        return destination

    @property
    def state_names(self) -> list[str]:
        return list(self._state_names)

    def own_state_dict(self) -> dict[str, Any]:
        return self._own_state(keep_vars=False)

    def _own_state(self, *, keep_vars: bool) -> dict[str, Any]:
        own = OrderedDict(with_every_name(self._own.state_dict(keep_vars=keep_vars), self._first_state_names))
        cast("Any", own)._metadata = self._metadata  # the state_dict versions of the modules
        return own

    def gather_state_dict(self) -> dict[str, Any]:
        whole: dict[str, Any] = self.state_dict(rank0_only=True)
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's part of the whole model's state, however the model was cut when it was saved.

        Raises:
            RuntimeError: a shape differs; or with `strict`, names are missing or unknown.
            ValueError: `assign` is true, which would replace the stages' tensors.
        """
        if assign:
            raise ValueError("Pipeline.load_state_dict copies into the stages' tensors; assign=True is not supported")
        missing, unexpected = compare_names(state_dict, self._state_names)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for Pipeline of {self._model_name}:"
                + (f"\n\tMissing key(s): {', '.join(map(repr, missing))}." if missing else "")
                + (f"\n\tUnexpected key(s): {', '.join(map(repr, unexpected))}." if unexpected else "")
            )
        first = self._first_state_names
        self._own.load_state_dict(select_own(state_dict, self._own.state_dict(), first), strict=False)
        loaded = {first.get(name, name) for name in state_dict}
        self._without_values = [name for name in self._without_values if first.get(name, name) not in loaded]
        return _IncompatibleKeys(missing, unexpected)

    # -- the optimizer of the whole model ------------------------------------------------------------------------

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the state that one optimizer of the whole model would have. Any cut, and plain PyTorch, can load it.

        All ranks of all pipelines call it, with their optimizer of this Pipeline's parameters (also a
        ZeroRedundancyOptimizer over a mesh's axis "data"). With `rank0_only`, the first rank gets the whole state, and
        every other rank its own part.

        Raises:
            ValueError: the optimizer also updates other tensors, or is LBFGS, whose state spans all its parameters.
        """
        own, groups = self._own_entries(optimizer)
        is_first = self._data_group is None or self._data_group.rank() == 0
        if is_first or not hasattr(optimizer, "consolidate_state_dict"):
            own = gather_entries(own, self._group, rank0_only=rank0_only)
        whole = {"state": _nested(own), "param_groups": describe_groups(groups)}
        if self._data_group is not None and hasattr(optimizer, "consolidate_state_dict") and not rank0_only:
            shared = [whole if is_first else None]
            dist.broadcast_object_list(shared, group=self._data_group, group_src=0)
            whole = cast("dict[str, Any]", shared[0])
        return whole

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of the whole model's optimizer state, saved with any cut or by plain PyTorch.

        All ranks call it. Parameters are matched by name if the state has names. Otherwise its groups must be those of
        all ranks' optimizers together, or one group of all parameters, in the order of the whole model.

        Raises:
            ValueError: the state does not match; nothing was loaded on this rank.
        """
        fitting, problems = self.fit_optimizer_state(optimizer, state_dict, self.optimizer_layout(optimizer))
        if problems:
            raise ValueError(f"Pipeline.load_optimizer_state_dict: the state does not fit: {'; '.join(problems)}")
        optimizer.load_state_dict(fitting)

    def own_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's entries of the whole state, keyed by parameter number in that state. All ranks call it.

        For a sharded optimizer, the result has the form of its `shard_state_dict`, with a "layout".
        """
        if not hasattr(optimizer, "shard_state_dict"):
            own, groups = self._own_entries(optimizer)
            return {"state": _nested(own), "param_groups": describe_groups(groups)}
        groups = self._whole_groups(optimizer)
        numbers = number_names([group.names for group in groups])
        shard = optimizer.shard_state_dict()
        mine = _names(optimizer)
        renamed: dict[str, Any] = {
            key: {numbers[mine[at]]: part for at, part in shard[key].items() if mine[at]} for key in ("state", "layout")
        }
        return {**renamed, "param_groups": describe_groups(groups)}

    def optimizer_layout(self, optimizer: torch.optim.Optimizer) -> Layout:
        """Return the parameter names of each group of the whole model's optimizer. All ranks call it."""
        return [group.names for group in self._whole_groups(optimizer)]

    def fit_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], layout: Layout | None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return this optimizer's part of a whole state, in the form that it loads, and descriptions of mismatches.

        `layout` comes from `optimizer_layout`; without it, the state must have names, or one group of all parameters.
        """
        names = names_of(state, layout, list(self._places))
        if isinstance(names, str):
            return {}, [names]
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        return fit(state, names, self._own_groups(optimizer), shapes, list(self._places))

    def _own_entries(self, optimizer: torch.optim.Optimizer) -> tuple[dict[tuple[Any, ...], Any], list[ParamGroup]]:
        """Return this rank's state by (parameter number in the whole model, key), and the whole model's groups."""
        groups = self._whole_groups(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "Pipeline.optimizer_state_dict: LBFGS keeps one state for all its parameters at once, which does not "
                "fit another split. Save each rank's optimizer.state_dict() in a separate file"
            )
        if hasattr(optimizer, "consolidate_state_dict"):
            optimizer.consolidate_state_dict(to=0)
            if self._data_group is not None and self._data_group.rank():
                return {}, groups
        numbers = number_names([group.names for group in groups])
        names = _names(optimizer)
        entries: dict[tuple[Any, ...], Any] = {}
        for at, saved in optimizer.state_dict()["state"].items():
            if not isinstance(at, int):  # it belongs to no parameter
                entries[at,] = saved
            elif names[at]:
                entries.update({(numbers[names[at]], key): value for key, value in saved.items()})
        return entries, groups

    def _own_groups(self, optimizer: torch.optim.Optimizer) -> list[ParamGroup]:
        wrong = [p for group in optimizer.param_groups for p in group["params"] if whole_name(p) is None]
        if wrong:
            raise ValueError(
                f"Pipeline: the optimizer updates {len(wrong)} parameters that are not this pipeline's "
                f"(one has shape {tuple(wrong[0].shape)}). Give them a separate optimizer."
            )
        return [
            ParamGroup(options_of(group), [whole_name(p) or "" for p in group["params"]])
            for group in optimizer.param_groups
        ]

    def _whole_groups(self, optimizer: torch.optim.Optimizer) -> list[ParamGroup]:
        by_rank: list[Any] = [None] * self._group.size()
        try:
            mine: Any = self._own_groups(optimizer)
        except ValueError as error:  # all ranks must raise it
            mine = error
        dist.all_gather_object(by_rank, mine, group=self._group)
        if wrong := [one for one in by_rank if isinstance(one, ValueError)]:
            raise wrong[0]
        return merge_groups(by_rank, self._places)


def _names(optimizer: torch.optim.Optimizer) -> list[str]:
    return [whole_name(p) or "" for group in optimizer.param_groups for p in group["params"]]


def _nested(entries: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Return the entries as a dict of dicts, with the parameter numbers in order, and other keys last."""
    found: dict[Any, Any] = {}
    for path in sorted(entries, key=lambda path: (len(path) == 1, path[0] if len(path) > 1 else 0)):
        if len(path) == 1:
            found[path[0]] = entries[path]
        else:
            found.setdefault(path[0], {})[path[1]] = entries[path]
    return found


_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_SMALL_BYTES = 1024  # tensors up to this size, such as optimizers' step counts, are sent with the descriptions


def gather_state(
    own: Mapping[_Key, Any], names: Sequence[_Key], group: dist.ProcessGroup, *, rank0_only: bool = False
) -> OrderedDict[_Key, Any]:
    """Return all ranks' entries in the order of `names`; with `rank0_only`, other ranks get only their own.

    All ranks call it. An entry that several ranks have comes from the first of them.
    Cost: with `rank0_only`, each rank sends its entries to the first; otherwise, one broadcast per large tensor.
    """
    found = gather_entries(own, group, rank0_only=rank0_only)
    return OrderedDict((name, found[name]) for name in names if name in found)


def gather_entries(own: Mapping[_Key, Any], group: dist.ProcessGroup, *, rank0_only: bool = False) -> dict[_Key, Any]:
    """Return the entries as `gather_state` does, but in rank order."""
    rank = group.rank()
    described: list[Any] = [None] * group.size()
    dist.all_gather_object(described, {name: _describe(value) for name, value in own.items()}, group=group)
    found: dict[_Key, Any] = {}
    for source, entries in enumerate(described):
        for name, entry in entries.items():
            if name not in found:
                found[name] = _fetch(own.get(name), entry, source, rank, group, rank0_only)
    return dict(own) if rank0_only and rank else found


def _describe(value: Any) -> tuple[str, Any, Any, Strides | None]:
    if isinstance(value, Tensor) and value.nbytes > _SMALL_BYTES:
        return "tensor", tuple(value.shape), value.dtype, find_strides(value)
    return "object", value.detach().cpu() if isinstance(value, Tensor) else value, None, None


def _fetch(mine: Any, entry: tuple[str, Any, Any, Any], source: int, rank: int, group: Any, rank0_only: bool) -> Any:
    kind, shape, dtype, strides = entry  # for an object, `shape` is the object itself
    if kind == "object":
        return mine if rank == source else shape
    if rank0_only and (source == 0 or rank not in (0, source)):
        return mine
    if rank == source:
        flat = flatten(mine, strides).cpu()  # the other ranks receive into CPU memory
    else:
        flat = torch.empty(shape if strides is None else math.prod(shape), dtype=dtype, device="cpu")
    if not rank0_only:
        dist.broadcast(flat, group=group, group_src=source)
    elif rank == source:
        group.send([flat], 0, 0).wait()
    else:
        group.recv([flat], source, 0).wait()
    return mine if rank == source else restore(flat, shape, strides)


def first_names(module: nn.Module) -> dict[str, str]:
    """Return, for every key of the module's state, the first key of the same parameter, buffer or extra state.

    The two keys differ if a module is registered under several names, or a parameter in several modules.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    first: dict[tuple[int, str], str] = {}
    found: dict[str, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        path, _, last = name.rpartition(".")
        if isinstance(value, Tensor):
            found[name] = first.setdefault((id(value), ""), name)
        else:
            found[name] = first.setdefault((id(modules.get(path, name)), last), name)
    return found


def with_every_name(own: Mapping[str, _Value], first: Mapping[str, str]) -> dict[str, _Value]:
    """Return `own` with each entry under all its names in the whole model; `first` comes from `first_names`."""
    known = {first.get(name, name): value for name, value in own.items()}
    others = {name: known[same] for name, same in first.items() if same in known and name not in own}
    return {**own, **others}


def select_own(state: Mapping[str, Any], own: Iterable[str], first: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a whole state for the names `own`. For a tensor with several names, the last one counts.

    This is also the value that remains when plain PyTorch loads the whole model.
    """
    last = {first.get(name, name): state[name] for name in dict.fromkeys([*first, *own]) if name in state}
    selected = OrderedDict((name, last[first.get(name, name)]) for name in own if first.get(name, name) in last)
    if (versions := getattr(state, "_metadata", None)) is not None:  # the modules' versions
        selected._metadata = versions  # type: ignore[attr-defined]
    return selected


def compare_names(state: Mapping[str, Any], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the missing and the unexpected keys of `state`, as `load_state_dict` of the whole model reports them."""
    known = set(names)
    return [name for name in names if name not in state], [name for name in state if name not in known]


class OwnModules(nn.Module):
    """`OwnModules` has only the modules and tensors of some parts of a model, under their paths in the whole model."""

    def __init__(self, root: nn.Module, parts: Iterable[LayerRange], extra: Sequence[str] = ()) -> None:
        """Add the modules of `parts`; `extra` names parameters and buffers that no part uses but this rank keeps."""
        super().__init__()
        self.training = root.training
        parts = list(parts)
        for name in (name for part in parts for name in part.modules):
            self._put(root, name, root.get_submodule(name))
        for name in [*(name for part in parts for name in part.tensors), *extra]:
            path, _, last = name.rpartition(".")
            owner = root.get_submodule(path)
            holder = self._reach(root, path)
            if last in owner._parameters:
                holder._parameters[last] = owner._parameters[last]
            elif last in owner._buffers:
                holder.register_buffer(last, owner._buffers[last], last not in owner._non_persistent_buffers_set)
            else:
                setattr(holder, last, getattr(owner, last))

    def _put(self, root: nn.Module, name: str, module: nn.Module) -> None:
        path, _, last = name.rpartition(".")
        holder = self._reach(root, path)
        if last not in holder._modules:
            holder._modules[last] = module

    def _reach(self, root: nn.Module, path: str) -> nn.Module:
        """Return the module at `path`; create an empty one if there is none."""
        at: nn.Module = self
        for depth, step in enumerate(path.split(".") if path else ()):
            if step not in at._modules:
                at._modules[step] = nn.Module()
                at._modules[step].training = root.get_submodule(".".join(path.split(".")[: depth + 1])).training  # type: ignore[union-attr]
            child = at._modules[step]
            assert child is not None
            at = child
        return at


def unused_tensors(root: nn.Module, parts: Iterable[LayerRange]) -> list[str]:
    """Return the names of the model's parameters and buffers that none of its parts uses."""
    used = OwnModules(root, parts)
    known = {id(tensor) for tensor in (*used.parameters(), *used.buffers())}  # a tensor may have several names
    every = (*root.named_parameters(), *root.named_buffers())
    return [name for name, tensor in every if id(tensor) not in known]
