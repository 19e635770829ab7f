"""`ShardedStrategy` shards the optimizer state, or the whole model: each rank keeps a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from phalanx._base.param_groups import MakeOptimizer
from phalanx._comm.backend import Job
from phalanx.ddp import DistributedDataParallel
from phalanx.optim import ZeroRedundancyOptimizer
from phalanx.strategies.mirrored import MirroredStrategy
from phalanx.strategies.recipe import Recipe
from phalanx.strategies.strategy import may_have_others


class ShardedStrategy(MirroredStrategy):
    """Train like MirroredStrategy, on one or several hosts, with the training state sharded over the ranks.

    Arguments:
        shard: "optimizer": the optimizer's state (`phalanx.ZeroRedundancyOptimizer`: ZeRO stage 1, and parameters once
            per host); "model": also gradients and parameters (PyTorch's FSDP2, `fully_shard`), for models that are
            too large for one device.
        gather_gradients: False leaves each rank a slice of large averaged gradients (see ZeroRedundancyOptimizer).
        offload: True keeps the optimizer's state in the host's memory and updates there, for models on GPUs. The
            option is ZeroRedundancyOptimizer's (see there for supported hosts); with shard="model" it is FSDP2's
            `CPUOffloadPolicy`.
        devices, launch, timeout: as in MirroredStrategy.
        options: passed to DistributedDataParallel, or to fully_shard.

    Raises:
        ValueError, RuntimeError: as in MirroredStrategy.
    """

    name = "sharded"

    def __init__(
        self,
        shard: Literal["optimizer", "model"] = "optimizer",
        *,
        gather_gradients: bool = True,
        offload: bool = False,
        devices: int | Sequence[str] | None = None,
        launch: bool = True,
        timeout: float = 1800.0,
        **options: Any,
    ) -> None:
        if shard not in ("optimizer", "model"):
            raise ValueError(f"ShardedStrategy: shard must be 'optimizer' or 'model', got {shard!r}")
        self.shard = shard
        self._gather_gradients = gather_gradients
        self._offloads = offload
        self.is_elastic = shard == "optimizer"  # a lost rank's part of a sharded model exists on no other rank
        self.evaluates_together = self.ranks_differ = shard == "model"
        super().__init__(devices, launch=launch, timeout=timeout, **options)

    def _check_place(self, job: Job, wanted: int | None) -> None:
        super(MirroredStrategy, self)._check_place(job, wanted)

    def _set_up(self, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        if not may_have_others():
            return super()._set_up(model, optimizer)
        recipe = Recipe.of(self._called, model, optimizer)
        if self.shard == "model":
            return self._shard_model(model), recipe.make(dict(model.named_parameters()))
        wrapped = DistributedDataParallel(model, **self._options)
        groups = recipe.make_groups(dict(model.named_parameters()))
        sharded = ZeroRedundancyOptimizer(
            groups, recipe.kind, gather_gradients=self._gather_gradients, offload=self._offloads, **recipe.defaults
        )
        return wrapped, recipe.attach_hooks(sharded)

    def _shard_model(self, model: nn.Module) -> nn.Module:
        """Call `fully_shard` on each block of the model, and on the rest."""
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            fully_shard,
        )  # takes half a second to import: imported on use

        options = {"mesh": self._mesh(), **self._options}
        if self._offloads:
            options.setdefault("offload_policy", CPUOffloadPolicy(pin_memory=self.device.type != "cpu"))
        for block in find_blocks(model):
            fully_shard(block, **options)
        fully_shard(model, **options)
        return model

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.num_replicas_in_sync,))

    def _clip(self, max_norm: float) -> Tensor:
        if isinstance(self._optimizer, ZeroRedundancyOptimizer):
            return self._optimizer.clip_grad_norm_(max_norm)
        norm = super()._clip(max_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: the children of its ModuleLists and Sequentials that have parameters.

    A container without a forward is not a block, since nothing calls it; its children are blocks. A module that shares
    a parameter with modules outside of it is not a block either, since a parameter belongs to one block; the module's
    parts may be blocks.
    """
    names = _Names(model)
    found = {id(block): block for block in _search(model, False, names)}
    return list(found.values())


def _search(module: nn.Module, is_list: bool, names: _Names) -> Iterator[nn.Module]:
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) or (is_list and not _has_forward(module))
    for child in module.children():
        if is_list and _has_forward(child) and names.are_its_own(child):
            yield child
        else:
            yield from _search(child, is_list, names)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


class _Names:
    """`_Names` holds the names of all modules and parameters in a model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[int, list[str]] = {}
        self._parameters: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._modules.setdefault(id(module), []).append(name)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameters.setdefault(id(parameter), []).append(name)

    def are_its_own(self, block: nn.Module) -> bool:
        """Return whether a block has parameters, and shares none of them with modules outside of it."""
        prefixes = tuple(f"{name}." for name in self._modules[id(block)])
        names = [name for parameter in block.parameters() for name in self._parameters[id(parameter)]]
        return bool(names) and all(name.startswith(prefixes) for name in names)
