"""Save and restore the buffers of modules, even if they are registered late, resized, None, or shared."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from phalanx._comm.transport.tensors import copy_all
from phalanx.elastic.generations import JobEndedError

_ALIGN = 64


class Buffers:
    """`Buffers` finds the buffers of `layers` at each step, and makes a new plan if one was added, removed or reshaped.

    A buffer's form is its shape, strides, dtype and device.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = layers
        self._dicts = [layer._buffers for layer in layers.values()]
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._count = -1
        self._forms: list[Any] = []
        self.tensors: list[Tensor] = []
        """The buffers found by the latest call of `refresh`, each once."""
        self.plan = b""
        """Names and forms of the buffers, pickled for `restore`."""

    def refresh(self) -> bool:
        """Find the current buffers, and return whether names and forms are unchanged since the previous call."""
        count = sum(map(len, self._dicts))
        if count == self._count == 0:
            return True
        try:
            if count != self._count:
                raise KeyError
            found = [place[name] for place, name in self._places]
        except KeyError:
            self._count = count
            self._places = [(place, name) for place in self._dicts for name in place]
            found = [place[name] for place, name in self._places]
            self._forms = []
        forms = [None if t is None else (t.shape, t.stride(), t.dtype, id(t)) for t in found if _has_form(t)]
        if forms == self._forms and self.plan:
            return True
        self._forms = forms
        self._plan()
        return False

    def _plan(self) -> None:
        numbers: dict[int, int] = {}
        self.tensors = []
        entries = []
        for key, layer in self._layers.items():
            for name, tensor in layer._buffers.items():
                if not _has_form(tensor):
                    continue
                form = None
                if tensor is not None:
                    if id(tensor) not in numbers:
                        numbers[id(tensor)] = len(self.tensors)
                        self.tensors.append(tensor)
                    form = numbers[id(tensor)], tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device)
                entries.append((key, name, name not in layer._non_persistent_buffers_set, form))
        self.plan = pickle.dumps(entries)

    @property
    def nbytes(self) -> int:
        """Return how many bytes of memory `views` needs."""
        return room_for(self.tensors)

    def views(self, memory: Tensor) -> list[Tensor]:
        return views_of([(t.shape, t.dtype) for t in self.tensors], memory)

    @staticmethod
    def read(plan: bytes, memory: Tensor) -> list[Tensor]:
        """Return the values that `save` wrote to `memory` while `plan` was the plan."""
        forms = {form[0]: (torch.Size(form[1]), form[3]) for *_, form in pickle.loads(plan) if form is not None}
        return views_of([forms[number] for number in range(len(forms))], memory)

    def save(self, views: Sequence[Tensor]) -> None:
        if self.tensors:
            copy_all(list(views), [t.detach() for t in self.tensors])

    def versions(self) -> list[int]:
        """Return the version of each tensor, which changes when the tensor is changed in place."""
        if not self.tensors:
            return []
        return [0 if tensor.is_inference() else tensor._version for tensor in self.tensors]

    @torch.no_grad()
    def restore(self, plan: bytes, saved: Sequence[Tensor]) -> None:
        """Replace the buffers of the layers by those in `plan`, with the values of `saved`.

        Raises:
            JobEndedError: `plan` names a layer that this rank does not have.
        """
        entries = pickle.loads(plan)
        for key, name, *_ in entries:
            if key not in self._layers:
                raise JobEndedError(
                    f"the buffer {key}.{name} belongs to a layer that this rank does not have: layers that the loop "
                    "adds or removes cannot be restored. Create all layers before elastic.State"
                )
        forms: dict[int, Any] = {form[0]: form for *_, form in entries if form is not None}
        made: dict[int, Tensor] = {}
        for key, name, _, form in entries:  # a layer keeps a buffer that fits
            mine = self._layers[key]._buffers.get(name)
            if form is not None and mine is not None and form[0] not in made and _fits(mine, form):
                made[form[0]] = mine
        for number, form in forms.items():
            if number not in made:
                made[number] = torch.empty_strided(form[1], form[2], dtype=form[3], device=form[4])
            _write(made[number], saved[number])
        for layer, items in itertools.groupby(entries, key=lambda entry: entry[0]):
            _put(self._layers[layer], {name: (form and made[form[0]], keep) for _, name, keep, form in items})
        named = {key for key, *_ in entries}
        for key, layer in self._layers.items():
            if key not in named:
                _put(layer, {})


def _put(layer: nn.Module, buffers: Mapping[str, tuple[Tensor | None, bool]]) -> None:
    for name in [name for name, tensor in layer._buffers.items() if name not in buffers and _has_form(tensor)]:
        del layer._buffers[name]
        layer._non_persistent_buffers_set.discard(name)
    for name, (tensor, is_persistent) in buffers.items():
        layer._buffers[name] = tensor
        (layer._non_persistent_buffers_set.discard if is_persistent else layer._non_persistent_buffers_set.add)(name)


def _write(tensor: Tensor, saved: Tensor) -> None:
    spread = [dim for dim, step in enumerate(tensor.stride()) if step == 0 and tensor.shape[dim] > 1]
    for dim in spread:  # write each element of an expanded tensor once
        tensor, saved = tensor.narrow(dim, 0, 1), saved.narrow(dim, 0, 1)
    tensor.detach().copy_(saved)


def _fits(tensor: Tensor, form: Any) -> bool:
    _, shape, stride, dtype, device = form
    if not _has_form(tensor) or tensor.is_inference():
        return False
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device)) == (shape, stride, dtype, device)


def _has_form(tensor: Any) -> bool:
    return not isinstance(tensor, UninitializedBuffer)


def room_for(tensors: Sequence[Tensor]) -> int:
    """Return how many bytes of memory `views_of` needs for tensors of these shapes and dtypes."""
    return sum(-(-t.nbytes // _ALIGN) * _ALIGN for t in tensors)


def views_of(forms: Sequence[tuple[torch.Size, torch.dtype]], memory: Tensor) -> list[Tensor]:
    """Return views of `memory` with these shapes and dtypes, one after another."""
    views, at = [], 0
    for shape, dtype in forms:
        nbytes = shape.numel() * dtype.itemsize
        views.append(memory[at : at + nbytes].view(dtype).view(shape))
        at += -(-nbytes // _ALIGN) * _ALIGN
    return views
