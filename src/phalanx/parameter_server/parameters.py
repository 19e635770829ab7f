"""`Parameters` are a `ParameterServer`'s tensors by name; they check the arguments of a trainer's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.parameter_server.groups import KINDS, Group
from phalanx.parameter_server.layout import State

_INTEGERS = (torch.int64, torch.int32)


class Parameters:
    """`Parameters` are the dense parameters and tables of the ParameterServer `name`, as passed to this trainer."""

    def __init__(self, name: str, dense: dict[str, Tensor], tables: dict[str, Tensor]) -> None:
        self._name = name
        self.dense = dense
        self.tables = tables

    def of_kind(self, kind: str) -> dict[str, Tensor]:
        return self.dense if kind == "dense" else self.tables

    def check_names(self, dense: Sequence[str], rows: Mapping[str, Tensor]) -> None:
        """Raise if a name or a row id does not exist.

        Raises:
            ValueError: a name is unknown, or an id is out of range.
            TypeError: ids are not integers.
        """
        unknown = [one for one in dense if one not in self.dense] + [one for one in rows if one not in self.tables]
        if unknown:
            raise ValueError(
                f"ParameterServer {self._name!r} has no {unknown}; dense: {list(self.dense)}, tables: "
                f"{list(self.tables)}"
            )
        for key, ids in rows.items():
            if ids.dtype not in _INTEGERS:
                raise TypeError(f"ids of {key!r} must be int64 or int32, got {ids.dtype}")
            num = len(self.tables[key])
            if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= num):
                raise ValueError(
                    f"ids of {key!r} must be from 0 to {num - 1}, got {int(ids.min())} to {int(ids.max())}"
                )

    def sum_gradients(
        self, dense: Mapping[str, Tensor], rows: Mapping[str, tuple[Tensor, Tensor]]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Check gradients by name; return the tables' gradients with one summed gradient per id.

        Raises:
            ValueError, TypeError: a name is unknown, or a shape or dtype does not match.
        """
        self.check_names(list(dense), {key: ids for key, (ids, _) in rows.items()})
        for key, grad in dense.items():
            if grad.shape != self.dense[key].shape:
                raise ValueError(
                    f"ParameterServer.push: {key!r} has shape {tuple(self.dense[key].shape)}, but its gradient has "
                    f"{tuple(grad.shape)}"
                )
            _check_gradient(key, grad, self.dense[key])
        summed = {}
        for key, (ids, grads) in rows.items():
            shape = self.tables[key].shape
            if grads.shape != (ids.numel(), shape[1]):
                raise ValueError(
                    f"ParameterServer.push: {ids.numel()} ids of {key!r} need gradients of shape "
                    f"{(ids.numel(), shape[1])}, got {tuple(grads.shape)}"
                )
            _check_gradient(key, grads, self.tables[key])
            grad = torch.sparse_coo_tensor(
                ids.reshape(1, -1), grads, shape, device=grads.device, check_invariants=False
            ).coalesce()
            summed[key] = (grad.indices()[0], grad.values())
        return summed

    def check_state(self, state: State) -> None:
        """Check that a state has the same parameters, of the same shapes.

        Raises:
            ValueError: the state has other parameters or shapes.
        """
        for kind in KINDS:
            theirs = {name: tuple(value.shape) for name, value in state[kind].items()}
            mine = {name: tuple(value.shape) for name, value in self.of_kind(kind).items()}
            if theirs != mine:
                raise ValueError(
                    f"ParameterServer.load_state_dict: the state's {kind} parameters are {theirs}, this one's {mine}"
                )


def _check_gradient(key: str, grad: Tensor, of: Tensor) -> None:
    if grad.dtype != of.dtype or grad.layout is not torch.strided or grad.device.type != "cpu":
        raise TypeError(
            f"ParameterServer.push: the gradient of {key!r} must be a dense tensor of {of.dtype} on the CPU, got "
            f"{grad.dtype}, {grad.layout}, {grad.device}"
        )


def describe(group: Group, values: Mapping[str, Tensor]) -> str:
    """Describe a group, so that trainers can detect that they have passed different groups."""
    forms = {name: (tuple(values[name].shape), str(values[name].dtype)) for name in group["params"]}
    return f"{forms}, { {key: one for key, one in group.items() if key != 'params'} }"
