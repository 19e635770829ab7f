"""Keep replicas of a pipeline equal, stage by stage: average gradients, and copy the first replica's buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.pipeline.batchnorm import MiniBatchStatistics

_BUCKET_BYTES = 25 * 1024 * 1024


class Replicas:
    """`Replicas` averages gradients over the replicas of this rank's stages; each pipeline has one. Collective.

    All replicas start from the values of the first.
    """

    def __init__(self, group: dist.ProcessGroup, module: nn.Module, statistics: MiniBatchStatistics) -> None:
        """Copy the first replica's parameters and buffers. Later, `statistics` itself keeps its buffers equal."""
        self.group = group
        self._module = module
        self._statistics = statistics
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                memory = _memory(tensor)
                value = memory.contiguous()
                dist.broadcast(value, group=group, group_src=0)
                if value.data_ptr() != memory.data_ptr():
                    memory.copy_(value)
        self._equal = {name: _bytes_of(buffer).clone() for name, buffer in self._buffers()}
        """The bytes of the buffers when they were last equal on all replicas."""

    def average(self) -> None:
        """Replace gradients by their mean over the replicas, and changed buffers by the first replica's.

        A parameter that no replica used gets no gradient, and a frozen one keeps its gradient. If all gradients of a
        parameter are sparse, so is their mean.

        Cost: one all_reduce of 2P + B floats (P parameters, B buffers), one per 25 MiB of gradients, and one per sparse
        gradient. Buffers are compared with a copy, and one broadcast sends all that changed.
        """
        # Any parameter may have been frozen or unfrozen since the last step, so all are checked each time.
        parameters = list(self._module.parameters())
        buffers = self._buffers()
        used = [p.grad is not None and p.requires_grad for p in parameters]
        dense = [has and not p.grad.is_sparse for has, p in zip(used, parameters, strict=True)]  # type: ignore[union-attr]
        changed = [not _is_equal(self._equal.get(name), buffer) for name, buffer in buffers]
        counts = torch.tensor([*used, *dense, *changed], dtype=torch.float32, device="cpu")
        dist.all_reduce(counts, group=self.group)
        is_used, is_dense, has_changed = torch.split(counts > 0, [len(used), len(dense), len(changed)])
        kinds = list(zip(parameters, is_used.tolist(), is_dense.tolist(), strict=True))
        self._average_dense([p for p, _, any_dense in kinds if any_dense])
        for parameter in [p for p, any_used, any_dense in kinds if any_used and not any_dense]:
            self._average_sparse(parameter)
        self._take_first([named for named, has in zip(buffers, has_changed.tolist(), strict=True) if has])

    def _average_dense(self, parameters: Sequence[nn.Parameter]) -> None:
        works = []
        for bucket in _buckets(parameters):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            grads = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
            flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(self.group.size())
            works.append((bucket, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        for bucket, flat, work in works:
            work.wait()
            for parameter, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = part.view_as(parameter).clone()
                else:
                    parameter.grad.copy_(part.view_as(parameter))

    def _average_sparse(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None:  # it has nothing to add, but the others wait for this rank
            grad = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64, device="cpu"),
                torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device="cpu"),
                parameter.shape,
                device="cpu",
                check_invariants=False,
            )
        total = (grad.detach().cpu().coalesce() / self.group.size()).coalesce()
        dist.all_reduce(total, group=self.group)
        parameter.grad = total.to(parameter.device)

    def _buffers(self) -> list[tuple[str, Tensor]]:
        own = self._statistics.buffers()
        return [named for named in self._module.named_buffers() if id(named[1]) not in own]

    def _take_first(self, named: Sequence[tuple[str, Tensor]]) -> None:
        if not named:
            return
        flat = torch.cat([_bytes_of(buffer) for _, buffer in named])
        dist.broadcast(flat, group=self.group, group_src=0)
        sizes = [_memory(buffer).numel() * buffer.element_size() for _, buffer in named]
        for (name, buffer), part in zip(named, torch.split(flat, sizes), strict=True):
            self._equal[name] = part.clone()  # in its own memory, which is aligned for any dtype
            if self.group.rank() != 0:
                memory = _memory(buffer)
                memory.copy_(self._equal[name].view(buffer.dtype).view(memory.shape))


def _memory(tensor: Tensor) -> Tensor:
    """Return a view that has each element of the memory once: expanded dimensions get size 1."""
    tensor = tensor.detach()
    if 0 not in tensor.stride():
        return tensor
    sizes = [size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, [stride or 1 for stride in tensor.stride()])


def _bytes_of(tensor: Tensor) -> Tensor:
    return _memory(tensor).resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _is_equal(kept: Tensor | None, tensor: Tensor) -> bool:
    return kept is not None and kept.device == tensor.device and torch.equal(kept, _bytes_of(tensor))


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        nbytes = parameter.numel() * parameter.element_size()
        if not buckets or filled + nbytes > _BUCKET_BYTES or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += nbytes
    return buckets
