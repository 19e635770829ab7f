"""Check what a trainer gives a `ParameterServer`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.errors import summary_of
from phalanx.parameter_server.groups import MakeOptimizer, Options

Given = Mapping[str, Sequence[tuple[Mapping[str, Tensor], Options]]]  # by "dense" and "tables"


def find_problems(servers: tuple[str, ...], trainers: tuple[str, ...], me: str, groups: Given) -> list[str]:
    """Return what makes no sense, in words; an empty list if all does."""
    problems = []
    for what, workers in (("servers", servers), ("trainers", trainers)):
        if not workers or len(set(workers)) != len(workers):
            problems.append(f"{what} must be names of workers, one or more, each once, got {workers}")
    if me not in trainers:
        problems.append(f"this worker is {me!r}, which is not among the trainers {trainers}")
    if not any(groups.values()):
        problems.append("there is neither a dense parameter nor a table")
    known: dict[str, Tensor] = {}
    for kind, each in groups.items():
        for values, _ in each:
            problems += find_wrong_tensors(kind, values, known)
            known |= values
    return problems


def find_wrong_tensors(kind: str, values: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> list[str]:
    """Return what is wrong with the tensors of one group, where `known` are those of others."""
    problems = []
    if twice := sorted(values.keys() & known.keys()):
        problems.append(f"{twice} are names of several dense parameters or tables")
    if kind == "tables":
        odd = {key: tuple(one.shape) for key, one in values.items() if one.dim() != 2}
        problems += [f"table {key!r} must be a matrix, got {shape}" for key, shape in odd.items()]
    odd_ones = [key for key, one in values.items() if not one.is_floating_point() or one.device.type != "cpu"]
    return problems + ([f"{odd_ones} must be floating point tensors on the CPU"] if odd_ones else [])


def try_optimizer(what: str, make: MakeOptimizer, *, sparse: bool) -> list[str]:
    """Make a step with it, so that what cannot work is told here and not by a server."""
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    grad = torch.ones(2, 2)
    parameter.grad = grad.to_sparse(1) if sparse else grad
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make([parameter]).step()
    except Exception as error:  # whatever an optimizer of the user raises
        kind = "gradients of rows" if sparse else "gradients"
        return [f"{what} {make!r} makes no step with {kind}: {summary_of(error)}"]
    return []
