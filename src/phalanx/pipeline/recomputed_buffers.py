"""Restore buffers that layers change in their forward, where a forward is run a second time in the backward.

The second run begins with what they were at the first, and its changes are dropped: they were made already. (BatchNorm
has its own way, whose statistics are those of the whole mini-batch.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_Place = tuple[nn.Module, str]


class RecomputedBuffers:
    """These are the buffers of some modules.

    Which of them change, in a mode, is seen when the first of them is run again.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        inner = {part: None for module in modules for part in module.modules()}
        self._all = [(part, name) for part in inner for name, buffer in part._buffers.items() if buffer is not None]
        self._changing: dict[Hashable, list[_Place]] = {}

    def values(self, mode: Hashable) -> dict[_Place, Tensor]:
        """Return copies of the buffers that may change."""
        return {place: _buffer(place).detach().clone() for place in self._changing.get(mode, self._all)}

    @contextmanager
    def as_they_were(self, values: Mapping[_Place, Tensor], mode: Hashable) -> Iterator[None]:
        """Give modules copies of `values` for buffers during the block, so what they do to them is lost."""
        now = {place: _buffer(place) for place in values}
        tried = {place: value.clone() for place, value in values.items()}
        for (module, name), value in tried.items():
            module._buffers[name] = value
        try:
            yield
        finally:
            for (module, name), value in now.items():
                module._buffers[name] = value
        if mode not in self._changing:
            self._changing[mode] = [place for place, value in values.items() if not torch.equal(value, tried[place])]


def _buffer(place: _Place) -> Tensor:
    module, name = place
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer
