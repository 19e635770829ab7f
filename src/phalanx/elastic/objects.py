"""`Objects` sorts the arguments of `State` by kind, and returns which parts to transfer and which states to save."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from phalanx._base.log import get_logger
from phalanx._base.partition.owners import owner_of
from phalanx._comm.backend.skeleton import split
from phalanx.checkpoint.wrappers import unwrap
from phalanx.data import DistributedSampler
from phalanx.elastic.rebind import averaging_modules, find_wrappers_outside
from phalanx.elastic.state_transfer import ModulePart, OptimizerPart, StatefulPart, StatePart
from phalanx.optim import ZeroRedundancyOptimizer
from phalanx.optim.rounds import Rounds
from phalanx.pipeline import Pipeline

_logger = get_logger(__name__)
_SMALL = 1 << 20


class Objects:
    """`Objects` keeps `things` by name, in the order in which they were given.

    Raises:
        TypeError: a Pipeline inside another module.
        ValueError: several samplers.
    """

    def __init__(self, things: Mapping[str, Any]) -> None:
        self.things = things
        kept = list(things.values())
        self.modules = [thing for thing in kept if isinstance(thing, nn.Module)]
        self.named_modules = {name: thing for name, thing in things.items() if isinstance(thing, nn.Module)}
        self.optimizers = [thing for thing in kept if isinstance(thing, Optimizer)]
        self.sharded = [one for one in self.optimizers if isinstance(one, ZeroRedundancyOptimizer)]
        self.rounds = [thing for thing in kept if isinstance(thing, Rounds)]
        self.pipelines = [thing for thing in self.modules if isinstance(thing, Pipeline)]
        for name, thing in things.items():
            if isinstance(thing, nn.Module) and _hides_pipeline(thing):
                raise TypeError(f"State: {name!r} contains a Pipeline; pass the Pipeline itself to State")
        self.schedulers = [thing for thing in kept if isinstance(thing, LRScheduler)]
        self.scalers = [thing for thing in kept if isinstance(thing, GradScaler)]
        samplers = [thing for thing in kept if isinstance(thing, DistributedSampler)]
        if len(samplers) > 1:
            raise ValueError("State: only one sampler can define the job's position, but there are several")
        self.sampler = samplers[0] if samplers else None
        optimized = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        known = (nn.Module, Optimizer, LRScheduler, GradScaler, Rounds, DistributedSampler)
        others = {name: thing for name, thing in things.items() if not isinstance(thing, known)}
        self.small = {name: thing for name, thing in others.items() if _is_small(thing.state_dict())}
        self._large = others.keys() - self.small.keys()
        self.trained = [m for m in self.modules if not optimized or any(id(p) in optimized for p in m.parameters())]

    def layers(self) -> Iterator[nn.Module]:
        """Return all modules and their submodules."""
        below = (layer for module in self.modules for layer in module.modules())
        return itertools.chain(self.pipelines, below)  # `Pipeline.modules()` does not include the Pipeline itself

    def named_layers(self) -> dict[str, nn.Module]:
        """Return all modules and their submodules by name, each once."""
        layers: dict[str, nn.Module] = {}
        seen: set[int] = set()
        for thing, module in self.named_modules.items():
            for name, layer in module.named_modules():
                if id(layer) not in seen:
                    seen.add(id(layer))
                    layers[f"{thing}.{name}" if name else thing] = layer
        return layers

    def refuse_unsupported(self, world_size: int) -> None:
        """Refuse objects whose state a replacement could not receive, before a job of `world_size` ranks trains.

        Raises:
            ValueError: a Pipeline; a model whose wrapper is not in State; a comm hook with a state of its own; a sparse
                or quantized buffer; PyTorch's ZeroRedundancyOptimizer, or ours over ranks that do not share memory, or
                over some ranks only.
        """
        for name, thing in self.things.items():
            if isinstance(thing, Pipeline):
                raise ValueError(
                    f"phalanx.elastic: {name!r} is a Pipeline. Only one rank has the state of a stage, so no "
                    "replacement could receive it. Save checkpoints (phalanx.CheckpointManager), and restart the "
                    "whole job (no elastic.run, --max-restarts)."
                )
            is_ours = isinstance(thing, ZeroRedundancyOptimizer)
            is_apart = thing.is_on_hosts if is_ours else _is_of_torch_in_shards(thing)
            is_some = is_ours and thing.world_size not in (1, world_size)
            if is_apart or is_some:
                over = "ranks that share no memory (several hosts)" if is_apart else "some ranks of the job"
                raise ValueError(
                    f"phalanx.elastic: {name!r} is a ZeroRedundancyOptimizer over {over}. Only one rank has each part "
                    "of its state, so no replacement could receive it. Use an unsharded optimizer, or restart the "
                    "whole job (no elastic.run, --max-restarts)."
                )
        outside = find_wrappers_outside(self.modules)
        for name, module in self.named_modules.items():
            parameters = {id(p) for p in module.parameters()}
            if wrapper := next((one for one in outside if not parameters.isdisjoint(map(id, one.parameters()))), None):
                raise ValueError(
                    f"phalanx.elastic: {name!r} is wrapped by a {type(wrapper).__name__} that State does not have, so "
                    "the wrapper could not join the group that is formed after a loss. Pass the wrapper to State "
                    "instead of the model, or create it in the function that elastic.run decorates."
                )
            for layer in averaging_modules([module]):
                for hook, state in _comm_hooks(layer):
                    if not (_is_constant(state) and _is_constant(hook)):
                        called = getattr(hook, "__name__", type(hook).__name__)
                        held = "a state of its own" if _is_constant(state) else f"a {type(state).__name__}"
                        raise ValueError(
                            f"phalanx.elastic: {name!r} has the comm hook {called} with {held}. A "
                            "hook's state (errors, counters) changes during a backward, differently on each rank, "
                            "and is lost with its rank. Register a hook without a state, or restart the whole job "
                            "(no elastic.run, --max-restarts)."
                        )
            for key, buffer in module.named_buffers():
                if buffer.layout != torch.strided or buffer.is_quantized:
                    raise ValueError(
                        f"phalanx.elastic: the buffer {name}.{key} is {buffer.layout}, {buffer.dtype}: sparse and "
                        "quantized buffers cannot be restored after a loss. Keep it dense, or outside the model."
                    )

    def watched_tensors(self) -> dict[Tensor, str]:
        """Return the tensors, with their names, that no optimizer updates and no rank's record holds."""
        updated = {p for o in self.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
        watched: dict[Tensor, str] = {}
        for name, module in self.things.items():
            if isinstance(module, nn.Module):
                watched |= {p: f"{name}.{key}" for key, p in module.named_parameters() if p not in updated}
                if all(module is not one for one in self.trained):
                    watched |= {b: f"{name}.{key}" for key, b in module.named_buffers()}
        # inference tensors have no version
        return {tensor: name for tensor, name in watched.items() if not tensor.is_inference()}

    # -- as parts ------------------------------------------------------------------------------------------------

    def parts(self) -> list[StatePart]:
        """Return the parts that are the same on every rank, in the order in which they are transferred."""
        parts: list[StatePart] = []
        models = self.named_modules
        shared = frozenset(id(p) for o in self.sharded for group in o.param_groups for p in group["params"])
        for name, thing in self.things.items():
            if isinstance(thing, nn.Module):
                parts.append(ModulePart(thing, buffers=False, without=shared))
            elif thing in self.sharded:
                continue  # a ShardedPart is transferred last, and to all ranks
            elif isinstance(thing, Optimizer):
                parts.append(OptimizerPart(thing, models))
            elif not isinstance(thing, DistributedSampler) and name not in self.small:
                parts.append(StatefulPart(thing, is_large=name in self._large))
        return parts

    def parts_of_update(self) -> list[StatePart]:
        """Return the parts that may change from an update to its commit, large objects (an averaged model) included."""
        return [part for part in self.parts() if not isinstance(part, StatefulPart) or part.is_large]

    # -- in a checkpoint -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each object but the sampler, by name.

        One rank may call this alone, unless there is a Pipeline.
        """
        states: dict[str, Any] = {}
        for name, thing in self.things.items():
            if isinstance(thing, DistributedSampler):
                continue
            if isinstance(thing, nn.Module):
                states[name] = unwrap(thing).state_dict()
            elif (pipe := _pipeline_of(thing)) is not None:
                states[name] = pipe.optimizer_state_dict(thing)
            elif isinstance(thing, ZeroRedundancyOptimizer):
                states[name] = _whole_state(thing)
            else:
                states[name] = thing.state_dict()
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Load the states of all objects.

        Raises:
            ValueError: the states belong to other objects, or to an optimizer of other parameters.
        """
        mine = {name for name, thing in self.things.items() if not isinstance(thing, DistributedSampler)}
        if differing := mine ^ states.keys():
            raise ValueError(
                f"State.load_state_dict: {min(differing)!r} is in the checkpoint or in State, but not in both"
            )
        for name, saved in states.items():
            thing = self.things[name]
            if saved is None:
                _logger.warning(
                    "phalanx.elastic: %r starts from scratch: the checkpoint lacks its state (see the log)", name
                )
                continue
            if (pipe := _pipeline_of(thing)) is not None:
                pipe.load_optimizer_state_dict(thing, saved)
            else:
                (unwrap(thing) if isinstance(thing, nn.Module) else thing).load_state_dict(saved)


def has_state(thing: Any) -> bool:
    """Return whether `thing` is an object with `state_dict` and `load_state_dict`, and not a plain value.

    Raises:
        TypeError: a sampler that cannot report its position.
    """
    if isinstance(thing, Sampler) and not isinstance(thing, DistributedSampler):
        raise TypeError(
            f"State: {type(thing).__name__} cannot report or restore its position. Use "
            "phalanx.DistributedSampler, which takes the same arguments."
        )
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _is_small(state: Any) -> bool:
    """Return whether `state` is small enough to copy in each step, up to 1 MiB; an averaged model, say, is larger."""
    tensors: list[Tensor] = []
    split(state, tensors)
    return sum(t.nbytes for t in tensors) <= _SMALL


def _comm_hooks(wrapper: Any) -> list[tuple[Any, Any]]:
    if isinstance(wrapper, TorchDistributedDataParallel):
        return list(wrapper._comm_hooks)
    return [] if wrapper._comm_hook is None else [(wrapper._comm_hook[1], wrapper._comm_hook[0])]


def _is_constant(held: object) -> bool:
    """Return whether nothing in `held`, including closures of functions, can change from step to step."""
    if type(held) is tuple:
        return all(map(_is_constant, held))
    if isinstance(held, functools.partial):
        return all(map(_is_constant, (held.func, held.args, *held.keywords.values())))
    if isinstance(held, types.FunctionType):
        return all(_is_constant(cell.cell_contents) for cell in held.__closure__ or ())
    return isinstance(
        held, (int, float, bool, str, type(None), torch.dtype, dist.ProcessGroup, types.BuiltinFunctionType)
    )


def _is_of_torch_in_shards(thing: object) -> bool:
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(thing, module.ZeroRedundancyOptimizer)


def _pipeline_of(thing: Any) -> Pipeline | None:
    """Return the pipeline whose parameters the optimizer `thing` updates; None if there is none."""
    owner = owner_of(thing) if isinstance(thing, Optimizer) else None
    return owner if isinstance(owner, Pipeline) else None


def _hides_pipeline(module: nn.Module) -> bool:
    if isinstance(module, Pipeline):
        return False
    children = [child for child in module._modules.values() if child is not None]
    return any(isinstance(child, Pipeline) or _hides_pipeline(child) for child in children)


def _whole_state(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    numbers = {p: number for number, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": optimizer.read_state_backup() or {}, "param_groups": groups}
