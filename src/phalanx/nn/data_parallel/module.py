"""`DataParallel` is the wrapper that users see."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from phalanx.backend.dynamo import untraced
from phalanx.nn.data_parallel.devices import CPU, DeviceId, check_output_device, decide_replicas, name_accelerators
from phalanx.nn.data_parallel.gather import gather
from phalanx.nn.data_parallel.parallel_apply import parallel_apply
from phalanx.nn.data_parallel.replicate import replicate
from phalanx.nn.data_parallel.scatter import scatter


class DataParallel(nn.Module):
    """Cut each batch in parts, run a replica of `module` on each part in a thread, and join the outputs.

    It has the name, arguments and methods of PyTorch's class, for the CPU, where PyTorch's own only calls the module.
    On a machine with an accelerator, unless `device_ids` names the CPU, the call returns PyTorch's own class.
    `DistributedDataParallel` is faster if Python takes a part of the time: `benchmarks/threads` shows by how much,
    and why.

    The replicas share the module's parameters; the sum of their gradients arrives in it, so that a loss over the joined
    outputs trains as without the wrapper. Replica 0 uses the module's own buffers, so what it changes in them (running
    statistics) stays. Changes by other replicas are lost, and so is everything that forward assigns to attributes.
    Hooks run once per replica, in its thread. The threads have the grad mode, inference mode and autocast of the
    caller, and share its intra-op threads.

    Random numbers come from the one generator of the CPU, in the order in which the threads ask: with dropout two runs
    are not the same. If forward uses a tensor that is not a parameter, a buffer or an argument, the replicas share it;
    if it needs a gradient, it must be a leaf.

    Shape: tensors in arguments are cut along `dim` as by `torch.chunk`, and outputs are joined along it; a scalar
        output becomes a vector with an entry per replica, with a warning. A batch smaller than the number of replicas
        leaves some without work.
    Cost: replicas are made in each forward (`phalanx.nn.data_parallel.replicate`); gradients exist once per
        replica during backward.
    Numerics: gradients are those of `module` on the whole batch, up to rounding; sums are in the order of replicas.

    Arguments:
        module: the module to replicate, on the CPU.
        device_ids: `["cpu", "cpu"]`, one per replica, or a number of replicas; None: one per intra-op thread.
        output_device: the CPU, or None.
        dim: the dimension along which arguments are cut.

    Raises:
        ValueError: an argument makes no sense; a tensor can't be cut; replicas returned outputs of different structure.
        TypeError: an output can't be joined, or a compiled module replicated.
        RuntimeError: the module is not on the CPU, or backward is called with create_graph=True.
    """

    def __new__(
        cls,
        module: nn.Module | None = None,  # copies and pickles come without
        device_ids: int | Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
    ) -> Any:
        """Return an instance of this class where devices are threads; of PyTorch's where they are accelerators."""
        if module is not None and torch.accelerator.is_available() and name_accelerators(device_ids, output_device):
            return nn.DataParallel(module, device_ids, output_device, dim)  # type: ignore[arg-type]
        return super().__new__(cls)

    def __init__(
        self,
        module: nn.Module,
        device_ids: int | Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.device_ids = decide_replicas(device_ids, torch.get_num_threads())
        check_output_device(output_device)
        self.output_device = CPU
        self.dim = dim
        self.module = module

    @untraced  # torch.compile does not follow into threads
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the replicas on their parts of the arguments."""
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            for tensor in chain(self.module.parameters(), self.module.buffers()):
                if tensor.device != CPU:
                    raise RuntimeError(
                        "module must have its parameters and buffers on device cpu (device_ids[0]) but found one of "
                        f"them on device: {tensor.device}"
                    )
            parts, named = self.scatter(inputs, kwargs, self.device_ids)
            if len(self.device_ids) == 1:
                return self.module(*parts[0], **named[0])
            replicas = self.replicate(self.module, self.device_ids[: len(parts)])
            return self.gather(self.parallel_apply(replicas, parts, named), self.output_device)

    # PyTorch's methods, which users override.

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_ids: Sequence[torch.device]
    ) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
        """Return the arguments of each replica."""
        if not inputs and not kwargs:
            return ((),), ({},)
        both = scatter((inputs, kwargs), len(device_ids), self.dim)
        return tuple(args for args, _ in both), tuple(named for _, named in both)

    def replicate(self, module: nn.Module, device_ids: Sequence[torch.device]) -> list[nn.Module]:
        """Return a replica for each device."""
        return replicate(module, len(device_ids))

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        """Return the outputs of the replicas."""
        return parallel_apply(self.module, replicas, inputs, kwargs)

    def gather(self, outputs: Sequence[Any], output_device: torch.device) -> Any:
        """Return the outputs as one."""
        return gather(outputs, self.dim)
