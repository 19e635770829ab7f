"""Convert each overload of PyTorch's process group methods to its first form.

torch's functions call the first form of each method with positional arguments, and the methods of our groups accept
this form. Programs that call a group's methods also use the other overloads, and keywords:

    group.allreduce(x, op=ReduceOp.MAX)      ─▶  allreduce([x], AllreduceOptions(reduceOp=MAX))
    group.gather(outputs, x, root=1)         ─▶  gather([outputs], [x], GatherOptions(rootRank=1))
    group.send(tensors=[x], dstRank=1, tag=0) ─▶  send([x], 1, 0)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Generator, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

c10d: Any = dist.distributed_c10d  # its stubs lack names used here

# The overloads in torch's order and with its names. T is a tensor, T* a list of tensors, T** a list of such lists; an
# argument with ? is optional. Methods of `Backend` (from `group._get_backend(device)`) have some other names.
_OVERLOADS: dict[str, tuple[str, ...]] = {
    "allreduce": ("tensors:T* opts?", "tensors:T* op? timeout?", "tensor:T op? timeout?"),
    "allreduce_coalesced": ("tensors:T* opts?",),
    "broadcast": ("tensors:T* opts?", "tensor:T root timeout?"),
    "reduce": ("tensors:T* opts?", "tensor:T root op? timeout?"),
    "allgather": (
        "output_tensors:T** input_tensors:T* opts?",
        "output_tensors:T* input_tensor:T timeout?",
    ),
    "allgather_coalesced": ("output_lists:T** input_list:T* opts?",),
    "all_gather_single": ("output:T input:T opts?",),
    "all_gather_single_coalesced": ("outputs:T* inputs:T* opts?", "output_lists:T* input_list:T* opts?"),
    "gather": (
        "output_tensors:T** input_tensors:T* opts?",
        "output_tensors:T* input_tensor:T root timeout?",
    ),
    "scatter": (
        "output_tensors:T* input_tensors:T** opts?",
        "output_tensor:T input_tensors:T* root timeout?",
    ),
    "reduce_scatter": (
        "output_tensors:T* input_tensors:T** opts?",
        "output:T input:T* op? timeout?",
        "output_tensors:T input_tensor:T* op? timeout?",
    ),
    "reduce_scatter_single": ("outputTensor:T inputTensor:T opts?",),
    "reduce_scatter_single_coalesced": ("outputs:T* inputs:T* opts?", "outputTensors:T* inputTensors:T* opts?"),
    "alltoall": (
        "output_tensors:T* input_tensors:T* opts?",
        "output_tensor:T* input_tensor:T* opts?",
        "output:T* input:T* timeout?",
    ),
    "all_to_all_single": (
        "output:T input:T output_split_sizes input_split_sizes opts?",
        "output:T input:T output_split_sizes input_split_sizes timeout?",
        "output_tensor:T input_tensor:T output_split_sizes input_split_sizes opts?",
    ),
    "barrier": ("opts?", "timeout?"),
    "send": ("tensors:T* dstRank tag",),
    "recv": ("tensors:T* srcRank tag",),
    "recv_anysource": ("tensors:T* tag", "arg0:T* arg1"),
}
METHODS = tuple(_OVERLOADS)
"""The names of a group's collectives and messages, by which torch's C++ looks for an override."""
OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""torch's names up to 2.12, which still work, keyed by the current names."""
_OVERLOADS |= {older: _OVERLOADS[name] for name, older in OLDER_NAMES.items()}

_ALL_TO_ALL = c10d.AllToAllOptions
_ALL_GATHERS = ("allgather", "all_gather", "_allgather")
_REDUCE_SCATTERS = ("reduce_scatter", "_reduce_scatter")
_OPTIONS: Mapping[str, type] = {
    "allreduce": c10d.AllreduceOptions,
    "allreduce_coalesced": c10d.AllreduceCoalescedOptions,
    "broadcast": c10d.BroadcastOptions,
    "reduce": c10d.ReduceOptions,
    "gather": c10d.GatherOptions,
    "scatter": c10d.ScatterOptions,
    "alltoall": _ALL_TO_ALL,
    "all_to_all_single": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,
    "barrier": c10d.BarrierOptions,
    **{name: c10d.AllgatherOptions for name in _OVERLOADS if name.startswith(_ALL_GATHERS)},
    **{name: c10d.ReduceScatterOptions for name in _OVERLOADS if name.startswith(_REDUCE_SCATTERS)},
}

# the field of the options, by an overload's argument
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
_LISTED = (list, tuple)


@functools.cache
def plain_form(name: str) -> tuple[int, type]:
    """Return the number of arguments of method `name` in its first form, and the type of the last one."""
    first = _parsed(name)[0]
    return len(first), _OPTIONS.get(name, int)


def first_form(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the call's arguments in the first form."""
    count, last = plain_form(name)
    if kwargs or len(args) != count or type(args[-1]) is not last:
        return resolve(name, args, kwargs)
    return args


def resolve(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of `group.<name>(*args, **kwargs)` in the first form of that method.

    Raises:
        TypeError: the call matches no overload of PyTorch's.
    """
    args = [_listed(value) for value in args]
    kwargs = {key: _listed(value) for key, value in kwargs.items()}
    overloads = _parsed(name)
    for overload in overloads:
        given = _bind(name, overload, args, kwargs)
        if given is not None:
            return _in_first_form(name, overloads[0], overload, given)
    said = [_kind_of(value) for value in args] + [f"{key}={_kind_of(value)}" for key, value in kwargs.items()]
    supported = "\n".join(f"    {name}({', '.join(map(str, overload))})" for overload in overloads)
    raise TypeError(
        f"{name}(): incompatible function arguments. The following are supported (T: a tensor, T*: a list of them, "
        f"T**: a list of lists):\n{supported}\nThe call was {name}({', '.join(said)})."
    )


@dataclass(frozen=True)
class _Parameter:
    name: str
    kind: str
    optional: bool

    def __str__(self) -> str:
        kind = f": {self.kind}" if self.kind.startswith("T") else ""
        return f"{self.name}{kind}{' = ...' if self.optional else ''}"

    def fits(self, method: str, value: Any) -> bool:
        if value is None:
            return self.optional and self.name != "op"
        return _FITS[self.kind](value) if self.kind != "opts" else isinstance(value, _OPTIONS[method])


@functools.cache
def _parsed(name: str) -> tuple[tuple[_Parameter, ...], ...]:
    return tuple(tuple(map(_parameter, overload.split())) for overload in _OVERLOADS[name])


def _parameter(text: str) -> _Parameter:
    name, _, kind = text.rstrip("?").partition(":")
    if not kind:
        kind = name if name in ("op", "opts", "timeout") else "sizes" if name.endswith("sizes") else "number"
    return _Parameter(name, kind, text.endswith("?"))


def _bind(
    method: str, overload: tuple[_Parameter, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[_Parameter, Any] | None:
    """Return the value of each parameter that was passed; None if the call is not this overload of `method`."""
    if len(args) + len(kwargs) > len(overload):
        return None
    given = dict(zip(overload, args, strict=False))
    for parameter in overload[len(args) :]:
        if parameter.name in kwargs:
            given[parameter] = kwargs[parameter.name]
        elif not parameter.optional:
            return None
    if len(given) != len(args) + len(kwargs):
        return None
    return given if all(parameter.fits(method, value) for parameter, value in given.items()) else None


def _in_first_form(
    name: str, first: tuple[_Parameter, ...], overload: tuple[_Parameter, ...], given: Mapping[_Parameter, Any]
) -> tuple[Any, ...]:
    arguments = []
    for slot, parameter in zip(first, overload, strict=False):
        if slot.kind == "opts":
            break
        value = given.get(parameter)
        # A single value becomes a list. Ranks other than the root pass an empty list; the list of lists is then empty.
        wrapped = len(slot.kind) > len(parameter.kind) and slot.kind.startswith("T")
        arguments.append(([value] if isinstance(value, Tensor) or value else []) if wrapped else value)
    if name not in _OPTIONS:
        return tuple(arguments)
    options: Any = next((value for p, value in given.items() if p.kind == "opts" and value is not None), None)
    if options is None:
        options = _OPTIONS[name]()
        options.asyncOp = True
        for parameter, value in given.items():
            if parameter.name in _FIELDS and value is not None:
                setattr(options, _FIELDS[parameter.name], _as_field(parameter.name, value))
    return (*arguments, options)


def _as_field(name: str, value: Any) -> Any:
    if name == "root":
        return operator.index(value)
    if name == "op":
        return value if isinstance(value, dist.ReduceOp) else dist.ReduceOp(value)
    return value if isinstance(value, timedelta) else timedelta(seconds=value)


def _listed(value: Any) -> Any:
    """Return as a list any sequence that torch accepts as one; return other values unchanged."""
    if isinstance(value, (*_LISTED, Tensor, str, bytes, Mapping)):
        return value
    is_sequence = hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    return list(value) if is_sequence or isinstance(value, (Set, Generator, ValuesView, map)) else value


def _are_tensors(value: Any) -> bool:
    return isinstance(value, _LISTED) and all(isinstance(item, Tensor) for item in value)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "T": lambda value: isinstance(value, Tensor),
    "T*": _are_tensors,
    "T**": lambda value: isinstance(value, _LISTED) and all(map(_are_tensors, value)),
    "number": lambda value: hasattr(value, "__index__") and not isinstance(value, Tensor),
    "sizes": lambda value: isinstance(value, _LISTED) and all(hasattr(item, "__index__") for item in value),
    "op": lambda value: isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)),
    "timeout": lambda value: isinstance(value, (timedelta, float)),
}


def _kind_of(value: Any) -> str:
    if isinstance(value, _LISTED):
        return f"{type(value).__name__} of {', '.join(sorted({_kind_of(item) for item in value})) or 'nothing'}"
    return type(value).__name__


def arguments_of_allreduce(tensors: Any, opts: Any, timeout: Any, op: Any, tensor: Any) -> tuple[Any, Any]:
    """Return the tensors and options of a call to any of PyTorch's overloads of `allreduce`."""
    if type(opts) is c10d.AllreduceOptions and isinstance(tensors, list) and timeout is op is tensor is None:
        return tensors, opts
    if isinstance(tensors, Tensor) and tensor is None:  # passed by position
        tensors, tensor = None, tensors
    if op is None and opts is not None and not isinstance(opts, c10d.AllreduceOptions):
        op, opts = opts, None
    given = {"tensors": tensors, "tensor": tensor, "opts": opts, "op": op, "timeout": timeout}
    listed, options = resolve("allreduce", (), {name: value for name, value in given.items() if value is not None})
    return listed, options
