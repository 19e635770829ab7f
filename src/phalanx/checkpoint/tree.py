"""`Tree` splits a state into leaves, named as in torch.distributed.checkpoint, and its exact structure.

    {"model": {"w": T}, "groups": [{"lr": 0.1}], "empty": {}}

    leaves      "model.w" -> T    "groups.0.lr" -> 0.1              stored and loaded by torch.distributed.checkpoint
    structure   dict or list or tuple, the keys' types, empty       lost there, so stored as plain data that torch.load
                containers, the places of tensors by name           opens with weights_only

As in torch, a list without tensors or dicts is one leaf, and so is a tuple without tensors. A sparse or nested
tensor cannot be cut into pieces, so the structure holds it as a value, like a number.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from phalanx._comm.transport.memory_order import find_strides
from phalanx.checkpoint.slices import SlicedTensor

Path = tuple[str | int, ...]
Node = tuple[Any, ...]
_DICTS = {"dict": dict, "OrderedDict": OrderedDict}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}


@dataclass
class Tree:
    """`Tree` is a state split into parts. `aliases` maps a tensor's name to the first tensor over the same memory."""

    leaves: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    structure: Node = ()

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Tree:
        """Split `state` into leaves and structure, without copies.

        Raises:
            NestingError: a dict, list or tuple contains itself, or they are nested too deeply.
        """
        tree = cls()
        try:
            tree.structure = tree._split(state, (), {})
        except RecursionError:
            raise NestingError(_describe_nesting(state)) from None
        return tree

    def _split(self, value: Any, path: Path, seen: dict[tuple[Any, ...], str]) -> Node:
        kind = type(value).__name__
        if is_tensor(value):
            name = self._add(value, path)
            if (memory := _memory(value)) is not None and seen.setdefault(memory, name) != name:
                self.aliases[name] = seen[memory]
            return ("tensor", name, _form(value))
        if type(value) in _DICTS.values():
            items = [(key, self._split(item, (*path, str(key)), seen)) for key, item in value.items()]
            return (kind, items, dict(vars(value)) if kind == "OrderedDict" else {})
        if type(value) in _SEQUENCES.values() and _is_branch(value):
            return (kind, [self._split(item, (*path, i), seen) for i, item in enumerate(value)])
        self._add(value, path)
        return ("value", value)

    def _add(self, value: Any, path: Path) -> str:
        name = base = ".".join(map(str, path))
        count = 1
        while name in self.leaves:  # {"a.b": 1, "a": {"b": 2}}, {1: x, "1": y}
            count += 1
            name = f"{base}#{count}"
        self.leaves[name] = value
        self.paths[name] = path
        return name


def build(structure: Node, tensor: Callable[[str], Any], aliases: Mapping[str, str]) -> Any:
    """Rebuild the state from its structure; `tensor` returns the tensor with a given name."""
    kind = structure[0]
    if kind == "value":
        return structure[1]
    if kind == "tensor":
        name, (parameter, requires_grad, *_) = structure[1:]
        found = tensor(name) if name not in aliases else tensor(aliases[name]).detach()
        if parameter:
            return Parameter(found, requires_grad=requires_grad)
        return found.requires_grad_() if requires_grad else found
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](build(node, tensor, aliases) for node in structure[1])
    made = _DICTS[kind]((key, build(node, tensor, aliases)) for key, node in structure[1])
    if structure[2]:
        vars(made).update(structure[2])  # the versions in a module's state_dict
    return made


def merge(first: Node, second: Node) -> Node:
    """Merge the structures of two ranks: keep the entries of both, and the first rank's where they differ."""
    if first[0] in _DICTS and second[0] in _DICTS:
        theirs = dict(second[1])
        mine = [(key, merge(node, theirs.pop(key)) if key in theirs else node) for key, node in first[1]]
        items = mine + [(key, node) for key, node in second[1] if key in theirs]
        if all(type(key) is int for key, _ in items):  # an optimizer's parameters by number
            items.sort(key=lambda item: item[0])
        return (first[0], items, *first[2:])
    if first[0] in _SEQUENCES and first[0] == second[0]:
        shared = [merge(a, b) for a, b in zip(first[1], second[1], strict=False)]
        longer = max(first[1], second[1], key=len)
        return (first[0], shared + longer[len(shared) :])
    return first


def find(structure: Node, *path: Any) -> Node | None:
    """Return the node at `path`, or None."""
    node: Node | None = structure
    for key in path:
        if node is None or node[0] not in _DICTS:
            return None
        node = next((inner for name, inner in node[1] if name == key), None)
    return node


def tensor_names(structure: Node) -> list[str]:
    """Return the names of all tensors in a structure, in order."""
    if structure[0] == "tensor":
        return [structure[1]]
    if structure[0] == "value":
        return []
    inner = (node[1] if structure[0] in ("dict", "OrderedDict") else node for node in structure[1])
    return [name for node in inner for name in tensor_names(node)]


def strides_of_tensors(structure: Node) -> dict[str, tuple[int, ...]]:
    """Return the strides, by name, of tensors that are not contiguous."""
    if structure[0] == "tensor":
        return {structure[1]: tuple(structure[2][2])} if len(structure[2]) > 2 else {}
    if structure[0] == "value":
        return {}
    inner = (node[1] if structure[0] in ("dict", "OrderedDict") else node for node in structure[1])
    return {name: strides for node in inner for name, strides in strides_of_tensors(node).items()}


def is_tensor(value: object) -> bool:
    """Return whether a value is a leaf with a shape, which can be saved in pieces."""
    if is_dtensor(value):
        return True
    return isinstance(value, SlicedTensor) or (
        isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    )


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor, without importing DTensor's module, which takes most of a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _is_branch(value: list[Any] | tuple[Any, ...]) -> bool:
    if isinstance(value, list) and any(type(item) in _DICTS.values() for item in value):
        return True
    return any(_has_tensor(item) for item in value)


def _has_tensor(value: Any) -> bool:
    if type(value) in _DICTS.values():
        return any(_has_tensor(item) for item in value.values())
    if type(value) in _SEQUENCES.values():
        return _is_branch(value)
    return is_tensor(value)


def _form(value: Any) -> tuple[Any, ...]:
    """Return whether a tensor is a parameter and requires a gradient, and its strides unless it is contiguous.

    torch.distributed.checkpoint does not store strides.
    """
    form = (isinstance(value, Parameter), getattr(value, "requires_grad", False))
    if is_dtensor(value) or (isinstance(value, Tensor) and value.layout is not torch.strided):
        return form
    strides = value.strides if isinstance(value, SlicedTensor) else find_strides(value)
    return form if strides is None else (*form, tuple(strides))


def _memory(value: Any) -> tuple[Any, ...] | None:
    """Return a key that is equal for two tensors only if they have the same elements in the same memory."""
    if is_dtensor(value) or not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    if value.numel() == 0 or value.is_meta:
        return None
    return (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())


# Find out why a state cannot be traversed: a container contains itself, or containers are nested too deeply.


class NestingError(Exception):
    """A container of the state contains itself (the message names it), or containers are nested too deeply."""


def _describe_nesting(state: object) -> str:
    """Describe which container in `state` contains itself, or else that containers are nested too deeply.

    This uses a stack of its own, because recursion has failed on `state`. A container's name grows with its depth, so
    only the returned names are made.
    """
    depths = {id(state): 0}
    done: set[int] = set()
    stack: list[tuple[object, object, Iterator[tuple[object, object]]]] = [(None, state, _inside(state))]

    def name(depth: int) -> str:
        return "state" + "".join(f"[{key!r}]" for key, _, _ in stack[1 : depth + 1])

    while stack:
        _, value, inside = stack[-1]
        for key, item in inside:
            if id(item) in depths:
                return f"{name(len(stack))}[{key!r}] is {name(depths[id(item)])} itself, so the state contains a cycle"
            if id(item) not in done and isinstance(item, (dict, list, tuple)):
                depths[id(item)] = len(stack)
                stack.append((key, item, _inside(item)))
                break
        else:
            stack.pop()
            del depths[id(value)]
            done.add(id(value))
    return "the dicts, lists and tuples of the state are nested too deeply for Python"


def _inside(value: object) -> Iterator[tuple[object, object]]:
    """Yield a container's elements with their keys or positions; containers of a user's class count as values."""
    if type(value) in (dict, OrderedDict):
        yield from value.items()  # type: ignore[attr-defined]
    elif type(value) in (list, tuple):
        yield from enumerate(value)  # type: ignore[arg-type]
