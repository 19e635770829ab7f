"""Update BatchNorm's running statistics once per step of a pipeline, from the whole mini-batch.

In training every micro-batch is normalized by its own statistics: the statistics of the whole mini-batch are known only
after its last micro-batch, and waiting for it would defeat the pipeline. The running statistics for evaluation are
still updated once per step, with the mean and the variance of all values of the mini-batch (as in GPipe). A layer that
`forward` calls twice gets two updates, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._base.torch_names import find

# torch has no public name for the base class of its BatchNorm layers.
_BatchNorm: Any = find(
    "torch.nn.modules.batchnorm._BatchNorm",
    loses="a Pipeline recognizes only PyTorch's own BatchNorm layers",
    instead=nn.BatchNorm1d,
)

_Seen = list[tuple[float, Tensor, Tensor]]
"""The number of values per channel, their means and their variances, for each micro-batch."""


class MiniBatchStatistics:
    """`MiniBatchStatistics` updates a module's BatchNorm layers, except layers whose class overrides `forward`."""

    def __init__(self, module: nn.Module, replicas: dist.ProcessGroup | None = None) -> None:
        """Find the layers of `module`. The mini-batches of all `replicas` (ranks with the same layers) count as one."""
        self._replicas = replicas
        self._layers = [
            layer
            for layer in module.modules()
            if isinstance(layer, (_BatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
            and type(layer).forward is _BatchNorm.forward
            and layer.track_running_stats
            and layer.running_mean is not None
        ]
        self._seen: dict[nn.Module, list[_Seen]] = {}  # for each call of the layer in a forward

    def buffers(self) -> set[int]:
        """Return the ids of the running statistics' tensors, which `update` keeps bitwise equal on all replicas."""
        found = (
            t for layer in self._layers for t in (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        )
        return {id(tensor) for tensor in found}

    def measured(self) -> AbstractContextManager[None]:
        """Record the input statistics of layers in training during one forward; running statistics do not change."""
        return self._watched() if self._layers else nullcontext()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        hooks = []
        for layer in self._layers:
            if layer.training:
                watch = _Watch(self._seen.setdefault(layer, []))
                hooks.append(layer.register_forward_pre_hook(watch.before))
                hooks.append(layer.register_forward_hook(watch.after, with_kwargs=True, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Discard the records of the block, in which a micro-batch is recomputed."""
        seen, self._seen = self._seen, {}
        try:
            with self.measured():
                yield
        finally:
            self._seen = seen

    def update(self) -> None:
        """Update the running statistics from all records since the last update. All replicas call it."""
        seen, self._seen = self._seen, {}
        moved = [(layer, _combine(call)) for layer in self._layers for call in seen.get(layer, ()) if call]
        if self._replicas is not None and moved:
            mine = torch.cat([statistics.flatten() for _, statistics in moved])
            found = [torch.empty_like(mine) for _ in range(self._replicas.size())]
            dist.all_gather(found, mine, group=self._replicas)
            sizes = [statistics.numel() for _, statistics in moved]
            by_rank = [torch.split(theirs, sizes) for theirs in found]
            moved = [
                (layer, _combine([_parts(theirs[at].view_as(statistics)) for theirs in by_rank]))
                for at, (layer, statistics) in enumerate(moved)
            ]
        with torch.no_grad():
            for layer, statistics in moved:
                _move(layer, *_parts(statistics))

    def forget(self) -> None:
        """Drop the records of a failed step."""
        self._seen = {}


class _Watch:
    """A `_Watch` lets a layer update separate buffers, which then contain the statistics of the micro-batch."""

    def __init__(self, seen: list[_Seen]) -> None:
        self._seen = seen
        self._calls = 0
        self._kept: tuple[Any, ...] = ()

    def before(self, layer: Any, args: tuple[Any, ...]) -> None:
        self._kept = (layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum)
        layer.running_mean = torch.zeros_like(layer.running_mean)
        layer.running_var = torch.ones_like(layer.running_var)
        layer.num_batches_tracked = layer.num_batches_tracked.clone()
        layer.momentum = 1.0  # the running statistics become those of the batch

    def after(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        mean, var = layer.running_mean, layer.running_var
        layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum = self._kept
        if self._calls == len(self._seen):
            self._seen.append([])
        self._calls += 1
        batch = args[0] if args else kwargs.get("input")
        if isinstance(output, Tensor) and isinstance(batch, Tensor) and batch.numel():
            self._seen[self._calls - 1].append((batch.numel() / batch.shape[1], mean, var))


def _combine(parts: _Seen) -> Tensor:
    """Return count, mean and unbiased variance of all values together: (3, C), with the count in every channel.

    As in Chan, Golub and LeVeque (1979), means and squared deviations are combined, not sums of squares.
    """
    count = sum(n for n, _, _ in parts)
    means = torch.stack([mean.double() for _, mean, _ in parts])
    sizes = torch.tensor([n for n, _, _ in parts], dtype=torch.float64, device=means.device).unsqueeze(1)
    mean = (means * sizes).sum(0) / count
    squares = torch.stack([var.double() * (n - 1) for n, _, var in parts])
    var = (squares + sizes * (means - mean).square()).sum(0) / max(count - 1, 1)
    return torch.stack([torch.full_like(mean, count), mean, var])


def _parts(statistics: Tensor) -> tuple[float, Tensor, Tensor]:
    return statistics[0, 0].item(), statistics[1], statistics[2]


def _move(layer: Any, count: float, mean: Tensor, var: Tensor) -> None:
    layer.num_batches_tracked.add_(1)
    share = 1.0 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
    for running, new in ((layer.running_mean, mean), (layer.running_var, var)):
        running.copy_(running.double().lerp(new, share))
