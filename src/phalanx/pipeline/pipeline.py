"""A model that is trained in stages on ranks: what a program sees of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.modules.module import _IncompatibleKeys

from phalanx.partition.balance import balance as best_balance
from phalanx.partition.layers import LayerList, list_layers
from phalanx.partition.measure import bind
from phalanx.partition.parts import Part, split
from phalanx.pipeline import micro_batches as batches
from phalanx.pipeline.batchnorm import MiniBatchStatistics
from phalanx.pipeline.execute import Executor, Work
from phalanx.pipeline.own_modules import OwnModules, nbytes, unused_tensors
from phalanx.pipeline.random_state import RandomState
from phalanx.pipeline.schedule import Schedule, ScheduleName, plan_schedule
from phalanx.pipeline.stage import Stage
from phalanx.pipeline.tied import TiedGradients, find_ties, parameters_of
from phalanx.pipeline.whole_state import gather_state, require_same_names
from phalanx.pipeline.wire import Step, Wire


class Pipeline(nn.Module):
    """Train `module` in stages, one or more on each rank of the group, through which micro-batches flow.

    Shape: inputs and targets have the samples of the mini-batch in their first dimension.

    Raises:
        ValueError: the model can't be cut as asked.
    """

    _own: OwnModules
    _first_names: dict[int, str]

    def __init__(
        self,
        module: nn.Module,
        stages: int | None = None,
        micro_batches: int = 8,
        schedule: ScheduleName = "1f1b",
        balance: Literal["auto"] | Sequence[int] | Sequence[str] = "auto",
        checkpoint: Literal["never", "except_last", "always"] = "never",
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._name: ScheduleName = schedule
        self._micro_batches = micro_batches
        self._checkpoint = checkpoint
        self._loss_fn = loss_fn
        planned = plan_schedule(schedule, self._size, micro_batches, stages)
        self._num_stages = planned.num_stages
        points = [name for name in balance if isinstance(name, str)] if balance != "auto" else []
        layers = list_layers(module, points)
        counts = self._balance(layers, balance)
        parts = split(layers, counts)
        own = [parts[index] for index in planned.stages_of(self._rank)]
        self._set("_own", OwnModules(module, own, unused_tensors(module, parts) if self._rank == 0 else ()))
        whole = module.state_dict()
        self._state_names = list(whole)
        self._metadata = whole._metadata  # type: ignore[attr-defined]
        self._model_name = type(module).__name__
        self._statistics = MiniBatchStatistics(self._own)
        self._layers = layers
        self._device = torch.device("cpu")
        self._random = RandomState(self._device)
        self._stages = [self._stage(part, parts, layers) for part in own]
        wire = Wire(group, self._num_stages, [planned.rank_of(k) for k in range(self._num_stages)], self._device)
        self._wire = wire
        self._shared = False
        rank_of = [planned.rank_of(k) for k in range(self._num_stages)]
        first_names = {id(p): name for name, p in module.named_parameters()}
        self._set("_first_names", first_names)
        ties = find_ties(module, parts, rank_of)
        self._tied = TiedGradients(ties, dict(self.named_parameters()), wire, self._rank)
        self._tied.share_values()
        self._executor = Executor(self._stages, wire, self._rank, self._num_stages, self._random)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # not as a child: names would begin with it

    def _stage(self, part: Part, parts: Sequence[Part], layers: LayerList) -> Stage:
        stage = Stage(part, part is parts[-1], self._own, layers.output, self._random)
        stage.parameters = parameters_of(layers.root, part)
        return stage

    def _balance(self, layers: LayerList, wanted: Any) -> list[int]:
        if wanted == "auto":
            return best_balance(_weights(layers), self._num_stages)
        if all(isinstance(n, int) for n in wanted):
            return list(wanted)
        begins = [0, *(layers.names.index(name) for name in wanted), len(layers.layers)]
        return [end - begin for begin, end in itertools.pairwise(begins)]

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss, on every rank."""
        work = self._work(args, kwargs, grad=True)
        sums: list[Tensor] = []
        offsets = {0: 0}

        def loss_of(micro_batch: int, step: Step, results: dict[fx.Node, Any]) -> Tensor:
            begin = offsets[micro_batch]
            offsets[micro_batch + 1] = begin + step.rows
            output = self._result(results)
            assert self._loss_fn is not None
            loss = self._loss_fn(output, batches.take(target, begin, step.rows))
            loss = loss * (step.rows / step.all_rows)
            sums.append(loss.detach())
            return loss

        work.finish = loss_of
        self._tied.begin()
        self._executor.run(work)
        self._tied.add()
        self._statistics.update()
        if not self._shared:  # the first step has shown what goes from stage to stage
            self._shared = True
            self._wire.share(_most(self._plan(self._micro_batches, True)))
        self.done = work.done
        loss = torch.stack([work.results[i] for i in sorted(work.results)]).sum() if work.results else torch.zeros(())
        dist.broadcast(loss, group=self._group, group_src=(self._num_stages - 1) % self._size)
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for a mini-batch, without gradients; on the last stage, None elsewhere."""
        work = self._work(args, kwargs, grad=False)
        work.finish = lambda i, step, results: self._result(results)
        self._executor.run(work)
        return batches.join([work.results[i] for i in sorted(work.results)]) if work.results else None

    def _work(self, args: Sequence[Any], kwargs: dict[str, Any], *, grad: bool) -> Work:
        work = Work(
            training=self.training,
            grad=grad,
            recompute=self._checkpoint,
            plan=lambda m: self._plan(m, grad),
            statistics=self._statistics,
        )
        if self._rank == 0:
            rows = batches.count_rows((args, kwargs), "the input")
            work.rows = batches.cut(rows, self._micro_batches)
            begins = [sum(work.rows[:i]) for i in range(len(work.rows))]
            values = bind(self._layers, args, kwargs)
            work.inputs = [batches.take_nodes(values, b, n) for b, n in zip(begins, work.rows, strict=True)]
        return work

    def _plan(self, micro_batches: int, grad: bool) -> Schedule:
        return plan_schedule(self._name, self._size, micro_batches, self._num_stages, training=grad)

    def _result(self, results: dict[fx.Node, Any]) -> Any:
        return fx.node.map_arg(self._layers.output.args[0], lambda node: results[node])

    # -- as of a module ------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank's stages, with the names of the whole model."""
        for name, parameter in self._own.named_parameters(prefix, recurse, remove_duplicate):
            first = self._first_names.get(id(parameter)) if remove_duplicate else None
            yield name if first is None else prefix + "." * bool(prefix) + first, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Of this rank's stages, with the names of the whole model."""
        yield from self._own.named_buffers(prefix, recurse, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Of this rank's stages, with the names of the whole model."""
        yield from self._own.named_children()

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False, rank0_only: bool = False
    ) -> Any:
        """The state of the whole model, as it is without a pipeline. Collective: every rank of the group calls it.

        With `rank0_only` the whole is on the first rank alone, and each other one has what is its own: for a model
        that is too large for one process.
        """
        own = self._own.state_dict(keep_vars=keep_vars)
        whole = gather_state(own, self._state_names, self._group, rank0_only=rank0_only)
        if destination is None:
            destination = whole
            destination._metadata = self._metadata
        else:
            destination.update({prefix + name: value for name, value in whole.items()})
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take this rank's part of the whole model's state, however the model was cut when that was saved."""
        if assign:
            raise ValueError("Pipeline.load_state_dict copies into the stages' tensors; assign=True is not possible")
        missing, unexpected = require_same_names(state_dict, self._state_names)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for Pipeline of {self._model_name}:"
                + (f"\n\tMissing key(s): {', '.join(map(repr, missing))}." if missing else "")
                + (f"\n\tUnexpected key(s): {', '.join(map(repr, unexpected))}." if unexpected else "")
            )
        mine = set(self._own.state_dict())
        self._own.load_state_dict({name: v for name, v in state_dict.items() if name in mine}, strict=False)
        return _IncompatibleKeys(missing, unexpected)


def _most(schedule: Schedule) -> int:
    """How many tensors of a size may lie in shared memory: those in flight, and what layers make on the way to them."""
    return 8 * max(schedule.in_flight(stage) for stage in range(schedule.num_stages)) + 16


def _weights(layers: LayerList) -> list[float]:
    """Of each layer the bytes of its parameters, where nothing was measured; and a little, for those without."""
    sizes = [
        sum(nbytes(layers.root.get_submodule(str(n.target)).parameters()) for n in layer.nodes if n.op == "call_module")
        for layer in layers.layers
    ]
    return [float(size) + 1e-3 * max(sizes) for size in sizes]
