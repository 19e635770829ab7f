"""Keep what compression has left out of each gradient for the next one, as error feedback.

        residual + gradient --compress--> what is sent
                     |                        |
                     '-------- minus ---------'---> residual of the next step

Nothing is lost, only late: what was sent up to a step, plus the residual, is the sum of all gradients up to it.
Source: Karimireddy et al. (2019), Error Feedback Fixes SignSGD and other Gradient Compression Schemes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Named = Iterable[tuple[str, Tensor]]
# it has of each slot the parameter's id, its offset and its number of elements
_Layout = tuple[tuple[int, int, int], ...]


class Residual:
    """A `Residual` has one residual per parameter, laid out as the buckets are, so that a bucket's residual is one flat
    tensor.

    When buckets are planned anew each parameter takes its own along. Half types keep theirs in float32.
    Memory: 4 bytes per element of gradient (8 for double precision), on every rank.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[_Layout, Tensor]] = {}
        self._views: dict[Tensor, Tensor] = {}

    def of(self, bucket: Any) -> Tensor:
        """Return the residual of a bucket as one flat tensor of `bucket.buffer()`'s length; writing into it changes the
        residual.
        """
        buffer: Tensor = bucket.buffer()
        parameters: list[Tensor] = bucket.parameters()
        start = buffer.storage_offset()
        slots = [(gradient.storage_offset() - start, gradient.numel()) for gradient in bucket.gradients()]
        layout = tuple((id(p), offset, numel) for p, (offset, numel) in zip(parameters, slots, strict=True))
        known = self._buckets.get(bucket.index())
        if known is not None and known[0] == layout and known[1].numel() == buffer.numel():
            return known[1]
        flat = torch.zeros(buffer.numel(), dtype=accumulator(buffer.dtype), device=buffer.device)
        for parameter, (offset, numel) in zip(parameters, slots, strict=True):
            view = flat[offset : offset + numel]
            before = self._views.get(parameter)
            if before is not None:
                view.copy_(before)
            self._views[parameter] = view
        self._buckets[bucket.index()] = layout, flat
        return flat

    def state_dict(self, named: Named) -> dict[str, Tensor]:
        """Return copies of the residuals, by the names of `named`, which lists the model's parameters."""
        return {name: self._views[parameter].clone() for name, parameter in named if parameter in self._views}

    def load_state_dict(self, state: Mapping[str, Tensor], named: Named) -> None:
        """Take over residuals by name; parameters without one start from zero.

        Raises:
            ValueError: a name is unknown, or a residual does not fit its parameter; nothing was changed.
        """
        parameters = dict(named)
        views = {}
        for name, saved in state.items():
            parameter = parameters.get(name)
            if parameter is None:
                raise ValueError(f"error feedback: there is no parameter {name!r} in the model")
            expected = parameter.numel() * (2 if parameter.is_complex() else 1)
            if saved.numel() != expected:
                raise ValueError(
                    f"error feedback: the residual of {name!r} has {saved.numel()} elements, its gradient {expected}"
                )
            views[parameter] = saved.detach().clone().view(-1).to(parameter.device)
        self._buckets, self._views = {}, views


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of `dtype` are added up and compressed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
