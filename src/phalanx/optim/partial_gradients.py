"""Track which slice of each gradient a rank has, with gather_gradients=False, and refuse wrong changes to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.gradient_shards import NeededSlice, need_all, need_slice
from phalanx.optim.plan import Slice


def ask_for_gradients(parameters: Sequence[Tensor], mine: Mapping[int, Slice] | None, group: dist.ProcessGroup) -> None:
    """From now on give this rank these slices of the parameters' gradients; all of them if None."""
    for index, parameter in enumerate(parameters):
        if mine is None:
            need_all(parameter)  # an optimizer before this one may have needed less
        else:
            part = mine.get(index, Slice(index, 0, 0))
            need_slice(parameter, part.start, part.stop, group)


def refuse_touched(slices: Iterable[tuple[Tensor, NeededSlice]], rank: int) -> None:
    """Refuse gradients that code has changed though it sees only a slice of them: it sees wrong values in the rest.

    Raises:
        RuntimeError: a gradient was changed.
    """
    for parameter, needed in slices:
        if parameter.grad is not None and needed.is_touched(parameter.grad):
            raise RuntimeError(
                f"ZeroRedundancyOptimizer.step on rank {rank}: the gradient of a parameter of shape "
                f"{tuple(parameter.shape)} was changed after backward, but with gather_gradients=False this rank "
                "has the mean of a slice of it only. Clip with optimizer.clip_grad_norm_(max_norm) in place of "
                "torch.nn.utils.clip_grad_norm_, or leave gather_gradients=False out."
            )
