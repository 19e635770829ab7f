"""Check the arguments of `ZeroRedundancyOptimizer`, and decide whether parameters may be cut between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

from phalanx._comm.transport.tensors import is_dense, memory_order
from phalanx.errors import MismatchError

_Form = tuple[tuple[int, ...], str, tuple[int, ...]]  # a parameter's shape, dtype and strides


# In these classes each element's update depends only on that element's gradient and state, and on scalars that all
# elements share. Subclasses are excluded: they may do anything.
_ELEMENT_WISE = frozenset(
    {
        optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
        optim.RMSprop, optim.Rprop, optim.ASGD,
    }
)  # fmt: skip

_REFUSED = {optim.LBFGS: "its direction and its line search depend on all parameters at once; use it without sharding"}


def decide_cut(optimizer_class: type[optim.Optimizer]) -> bool:
    """Return whether this class allows cuts inside a parameter; if not, each parameter goes to one rank as a whole.

    Every class that is not known to be element-wise gets whole parameters: Adafactor and Muon use rows, columns or
    norms of a parameter, SparseAdam uses sparse gradients, and a user's own class may use anything.

    Raises:
        TypeError: `optimizer_class` is not an optimizer class.
        ValueError: the class does not work even with whole parameters.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, optim.Optimizer)):
        raise TypeError(
            "ZeroRedundancyOptimizer: optimizer_class must be a subclass of torch.optim.Optimizer, "
            f"got {optimizer_class!r}"
        )
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise ValueError(f"ZeroRedundancyOptimizer does not support {refused.__name__}: {reason}")
    return optimizer_class in _ELEMENT_WISE


def refuse(overlap_with_ddp: bool, defaults: Mapping[str, Any]) -> None:
    """Refuse arguments that have no meaning for shared parameters.

    Raises:
        ValueError: an argument is refused; the message says why.
    """
    if overlap_with_ddp:
        raise ValueError(
            "ZeroRedundancyOptimizer does not support overlap_with_ddp=True on backend 'phalanx': it overlaps the "
            "broadcast of updated parameters, but here nothing is broadcast. Remove this argument and the hook."
        )
    if defaults.get("differentiable"):
        raise ValueError(
            "ZeroRedundancyOptimizer does not support differentiable=True: the update happens in other processes, "
            "which autograd cannot trace. Use the plain optimizer."
        )


def check_parameters(
    parameters: Iterable[Tensor], group: dist.ProcessGroup, *, offload: bool = False, others: Iterable[Tensor] = ()
) -> None:
    """Check that all ranks pass the same, valid parameters. All ranks call it.

    A ValueError about one parameter is raised on the ranks that have that parameter; other errors on all ranks.

    `others` are the parameters of other groups; they may include `parameters`.

    Raises:
        ValueError: a parameter is not a strided CPU tensor, or, with `offload`, is not a dense tensor; or two
            parameters overlap in memory.
        MismatchError: ranks pass different parameters.
    """
    parameters = list(parameters)
    for number, parameter in enumerate(parameters):
        if offload and (parameter.layout is not torch.strided or parameter.is_meta or not is_dense(parameter)):
            raise ValueError(
                f"ZeroRedundancyOptimizer: parameter {number} is {parameter.layout} on {parameter.device} with strides "
                f"{tuple(parameter.stride()) if parameter.layout is torch.strided else '-'}, but offload=True copies "
                "the memory of parameters, which must be dense: their elements must fill one block"
            )
        if offload:
            continue
        if parameter.device.type != "cpu" or parameter.layout is not torch.strided:
            raise ValueError(
                f"ZeroRedundancyOptimizer: parameter {number} is {parameter.layout} on {parameter.device}, but on "
                "backend 'phalanx' parameters must be dense and on the CPU, in memory that the host's ranks share. "
                "With offload=True, parameters stay on their device"
            )
    mine: list[_Form] = [(tuple(p.shape), str(p.dtype).removeprefix("torch."), memory_order(p)) for p in parameters]
    overlap = find_overlap([*parameters, *others])
    gathered: list[tuple[list[_Form], Any]] = [([], None)] * group.size()
    dist.all_gather_object(gathered, (mine, overlap), group=group)
    for rank, (_, shapes) in enumerate(gathered):
        if shapes is not None:
            raise ValueError(
                f"ZeroRedundancyOptimizer: two parameters, of shapes {shapes[0]} and {shapes[1]}, share "
                f"memory on rank {rank}, so one of their updates would be lost. Use the same "
                "nn.Parameter in both places (b = a, not nn.Parameter(a.data)), or clone one of them."
            )
    everyone = [theirs for theirs, _ in gathered]
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise MismatchError(
                "ZeroRedundancyOptimizer: the ranks pass different parameters. "
                f"{_difference(theirs, everyone[0], rank)}\n"
                "Build the model and its parameter groups from the same arguments on every rank.",
                calls={r: f"{len(given)} parameters" for r, given in enumerate(everyone)},
            )


def find_overlap(parameters: Iterable[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shapes of two dense parameters that overlap in memory, or None. Other parameters are ignored."""
    blocks = []
    for parameter in {id(parameter): parameter for parameter in parameters}.values():
        strided = parameter.layout is torch.strided and not parameter.is_meta
        if strided and parameter.numel() and is_dense(parameter):
            start = parameter.data_ptr()
            blocks.append((str(parameter.device), start, start + parameter.nbytes, tuple(parameter.shape)))
    blocks.sort()
    for (device, _, stop, shape), (other_device, start, _, other_shape) in itertools.pairwise(blocks):
        if device == other_device and start < stop:
            return shape, other_shape
    return None


def list_parameters(params: Any) -> tuple[Any, list[Tensor]]:
    """Return an optimizer's `params` argument, with iterators replaced by lists, and the tensors in it."""
    if isinstance(params, Tensor):  # the base class reports the error
        return params, []
    params = list(params)
    found: list[Any] = []
    for one in params:
        if not isinstance(one, dict):
            found.append(one)
            continue
        if not isinstance(one.get("params"), Tensor | set | None):
            one["params"] = list(one["params"])
        members = one.get("params")
        found += members if isinstance(members, list) else [members]
    tensors = [one[1] if isinstance(one, tuple) and len(one) == 2 else one for one in found]  # or (name, tensor)
    return params, [one for one in tensors if isinstance(one, Tensor)]


def _difference(theirs: list[_Form], first: list[_Form], rank: int) -> str:
    for number, (one, other) in enumerate(zip(theirs, first, strict=False)):
        if one != other:
            return (
                f"Parameter {number} of the group is {_describe(one)} on rank {rank} and {_describe(other)} on rank 0."
            )
    return f"Rank {rank} has {len(theirs)} parameters in the group, rank 0 has {len(first)}."


def _describe(form: _Form) -> str:
    shape, dtype, strides = form
    return f"of shape {shape}, {dtype}, strides {strides}"
