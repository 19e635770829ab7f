"""`Pipeline` trains a model in stages on several ranks; the public class of this package."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx._base.malloc import keep_freed_memory
from phalanx._base.partition.layers import given_arguments, list_layers
from phalanx._base.partition.measure import bind
from phalanx._base.partition.parts import LayerRange, split
from phalanx._comm.backend.shared import is_joining, require_group
from phalanx._comm.diagnostics.step_notes import note_loss
from phalanx.errors import ClosedError
from phalanx.pipeline import micro_batches as batches
from phalanx.pipeline.aliases import CopyCheck
from phalanx.pipeline.batchnorm import MiniBatchStatistics
from phalanx.pipeline.cut import (
    Balance,
    CutPlan,
    agree_on_cut,
    check_balance,
    describe_cut,
    require_one_owner_of_buffers,
    split_points,
)
from phalanx.pipeline.execute import Executor, StepWork
from phalanx.pipeline.failure import StageFailedError, StageLostError
from phalanx.pipeline.micro_batch_random import MicroBatchRandom
from phalanx.pipeline.outcome import StepOutcome
from phalanx.pipeline.progress import StepPhase, StepProgress
from phalanx.pipeline.replicas import Replicas
from phalanx.pipeline.schedule import PipelineSchedule, ScheduleName, plan_schedule
from phalanx.pipeline.stage import Stage
from phalanx.pipeline.stage_module import OwnModules, StageModule, unused_tensors
from phalanx.pipeline.tied import TiedGradients, find_ties, parameters_of
from phalanx.pipeline.values import share_result
from phalanx.pipeline.wire import PipelineNumbers, StepPlan, Wire

_Make = TypeVar("_Make", bound=Callable[..., Any])

# Names in torchgpipe, torch.distributed.pipelining and Megatron for arguments of a Pipeline.
_OTHER_NAMES = {
    "chunks": "micro_batches",
    "n_microbatches": "micro_batches",
    "num_microbatches": "micro_batches",
    "num_stages": "stages",
}
_CHECKPOINTS = ("never", "except_last", "always")


def refuse_foreign_names(make: _Make) -> _Make:
    """Wrap `make` so that another library's name for an argument raises a TypeError, which gives our name."""

    @functools.wraps(make)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for word in kwargs.keys() & _OTHER_NAMES.keys():
            ours = _OTHER_NAMES[word]
            raise TypeError(f"Pipeline has no argument {word!r}: use {ours}={kwargs[word]!r}")
        return make(*args, **kwargs)

    return cast(_Make, checked)


def check_arguments(
    module: Any,
    functions: Mapping[str, Any],
    micro_batches: int,
    ranks: int,
    schedule: str,
    checkpoint: str,
    reduction: str,
    outputs: str,
    balance: Any,
) -> None:
    """Raise ValueError or TypeError if an argument is invalid. `functions` maps argument names to functions or None."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"Pipeline: module must be an nn.Module, got {type(module).__name__}")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"Pipeline: {name} must be a function, got {type(function).__name__}")
    check_balance(balance)
    for name, value, allowed in (
        ("checkpoint", checkpoint, _CHECKPOINTS),
        ("loss_reduction", reduction, ("mean", "sum")),
        ("outputs", outputs, ("last", "all")),
    ):
        if value not in allowed:
            raise ValueError(f"Pipeline: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    if schedule != "gpipe" and micro_batches < ranks:
        raise ValueError(
            f"Pipeline: {micro_batches} micro-batch{'es' * (micro_batches != 1)} cannot keep {ranks} ranks busy: "
            f"schedule {schedule!r} needs one for each rank, and the bubble is short with four for each. Raise "
            "micro_batches, or use schedule 'gpipe', which accepts any number."
        )


def find_groups(
    mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the group of this pipeline and, if the mesh has replicas, the group of ranks with the same stages.

    Raises:
        ValueError: both are given, the mesh has other axes, or this rank is not in the group.
        RuntimeError: there is no process group.
    """
    if mesh is not None:
        if process_group is not None:
            raise ValueError("Pipeline takes process_group or mesh, not both")
        names = mesh.mesh_dim_names or ()
        if "pipeline" not in names or set(names) - {"pipeline", "data"}:
            raise ValueError(
                "Pipeline takes a mesh with the axes 'pipeline' and, if there are replicas, 'data', as in "
                f"phalanx.mesh(pipeline=2, data=2); got {', '.join(map(repr, names)) or 'none with names'}"
            )
        return mesh.get_group("pipeline"), mesh.get_group("data") if "data" in names else None
    return require_group(process_group, "Pipeline"), None


class Pipeline(StageModule):
    """Train `module` in stages on the ranks of a group; the micro-batches of a mini-batch flow through the stages.

    Losses, results, gradients and trained weights are those of the whole model in one process that runs the
    micro-batches one by one (`phalanx docs pipeline` shows that loop). Collective: every rank constructs its Pipeline,
    with the same model and arguments, and then calls the same steps. Each rank keeps only the layers of its stages:
    delete your reference to `module` afterwards, or build it on the meta device if it is too large for one process.

    Arguments:
        module: an `nn.Sequential`, or another module whose `forward` torch.fx can trace. Its children are the layers
            between which it may be cut. A value may skip stages, and several stages may share a parameter.
        stages: the number of stages. Default: one per rank. The interleaved schedule accepts any multiple of the number
            of ranks; its default is two per rank.
        micro_batches: the number of parts of a mini-batch. More parts give shorter bubbles, but less work in each.
        schedule: the order in which stages work on micro-batches (`phalanx explain pipeline` draws it).
        balance: where to cut. "time" minimizes the time of the slowest stage, "memory" the memory of the largest; both
            measure every layer on `example`. "auto" is "time" if there is an example. Without one, "auto" and "memory"
            balance parameter sizes. A list sets the cut itself: the number of layers of each stage, or the names of
            the modules at which all stages but the first begin.
        checkpoint: which micro-batches recompute their forward in the backward instead of keeping activations.
        loss_fn: called on the last stage with the model's result and the target of a micro-batch. Without it, the
            model's result is the loss.
        loss_reduction: how `loss_fn` reduces over its samples. The mini-batch's loss is reduced in the same way.
        example: a micro-batch, or a tuple or dict of arguments. `step` accepts an argument of `forward` that has a
            default only if `example` contains it; otherwise tracing fixes it at its default.
        outputs: which ranks get the result of an evaluation: the rank of the last stage, or all.
        mesh: a mesh with an axis "pipeline" and, if there are several pipelines, an axis "data", over which
            gradients are averaged (`phalanx.mesh`).
        process_group: the ranks of the pipeline, if there is no mesh. Default: all ranks.
        device: the device of this rank's stages. Default: the model's device; the CPU if that is the meta device.
        init_fn: called with the name and the tensor for each meta tensor that no `reset_parameters` initializes.

    Shape: the first dimension of input and target tensors is the batch. The last micro-batches may be smaller by one
    sample; a mini-batch with fewer samples than `micro_batches` is cut into one micro-batch per sample.

    Raises:
        ValueError: an argument is invalid, or the model can't be cut in this way; the message names the layer.
        TypeError: an argument has the wrong type.
        MismatchError: the ranks' models or arguments differ.
        RuntimeError: there is no process group.
    """

    @refuse_foreign_names
    def __init__(
        self,
        module: nn.Module,
        stages: int | None = None,
        micro_batches: int = 8,
        schedule: ScheduleName = "1f1b",
        balance: Balance = "auto",
        checkpoint: Literal["never", "except_last", "always"] = "never",
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        example: Any = None,
        outputs: Literal["last", "all"] = "last",
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        init_fn: Callable[[str, Tensor], object] | None = None,
    ) -> None:
        group, data_group = find_groups(mesh, process_group)
        planned = plan_schedule(schedule, group.size(), micro_batches, stages)
        functions = {"loss_fn": loss_fn, "init_fn": init_fn}
        check_arguments(
            module, functions, micro_batches, group.size(), schedule, checkpoint, loss_reduction, outputs, balance
        )
        super().__init__(module, group)
        layers = list_layers(module, split_points(balance), given=given_arguments(module, example))
        self._rank, self._size = group.rank(), group.size()
        self._num_stages, self._schedule, self._micro_batches = planned.num_stages, schedule, micro_batches
        self._checkpoint, self._all_outputs = checkpoint, outputs == "all"
        self._loss = Loss(loss_fn, mean=loss_reduction == "mean")
        self._layers = layers

        counts, reason, costs = agree_on_cut(layers, balance, planned, example, checkpoint, group, data_group)
        parts = split(layers, counts)
        require_one_owner_of_buffers(layers, parts)
        self.plan: CutPlan = describe_cut(layers, parts, planned, reason, costs)
        self._build_stages(module, parts, planned, device, init_fn, data_group)

    # -- building ------------------------------------------------------------------------------------------------

    def _build_stages(
        self,
        module: nn.Module,
        parts: Sequence[LayerRange],
        planned: PipelineSchedule,
        device: torch.device | str | None,
        init_fn: Callable[[str, Tensor], object] | None,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        mine = [parts[index] for index in planned.stages_of(self._rank)]
        own = OwnModules(module, mine, unused_tensors(module, parts) if self._rank == 0 else ())
        rank_of = [planned.rank_of(stage) for stage in range(self._num_stages)]
        ties = find_ties(module, parts, rank_of)
        left: list[Any] = [None] * self._size
        without = materialize(own, torch.device(device or "cpu"), init_fn)
        if device is not None:
            own.to(device)
        self._set_own(own)
        dist.all_gather_object(left, (without, PipelineNumbers.next), group=self._group)
        # the names from all ranks, so that every rank refuses a step
        self._without_values = [name for names, _ in left for name in names]
        number = PipelineNumbers.reserve(number for _, number in left)
        self._device = next((t.device for t in (*own.parameters(), *own.buffers())), torch.device(device or "cpu"))
        if self._device.type == "cpu":
            keep_freed_memory()

        self._random = MicroBatchRandom(self._device)
        self._wire = Wire(self._group, [*rank_of, *range(self._size)], self._device, number)
        self._shared = False
        stages = [
            Stage(part, part is parts[-1], own, self._layers.output, self._random, parameters_of(own, part))
            for part in mine
        ]
        self._tied = TiedGradients(ties, dict(self.named_parameters()), self._wire, self._rank)
        if not is_joining(self._group):
            self._tied.share_values()
        self._statistics = MiniBatchStatistics(own, data_group)
        self._replicas = None if data_group is None else Replicas(data_group, own, self._statistics)
        self._step = StepProgress()
        self._outcome = StepOutcome(self._group, data_group, self._device, self._wire.reduction_tag, self._step)
        home = dict.fromkeys(self._layers.inputs, 0) | {node: p.index for p in parts for node in p.nodes}
        self._copies = CopyCheck(self._layers.output.graph, home)
        self._executor = Executor(stages, self._wire, self._rank, self._num_stages, self._random, self._step)
        self._step_end = StepEndFailure(self._outcome, self._wire, self._executor, self._step)
        self._data_group = data_group

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Run forward and backward of a mini-batch, accumulate into `grad`, and return the loss on every rank.

        All ranks call it. Only the first rank needs the model's arguments, and only the last rank the target.

        Shape: inputs and targets (N, ...), the loss ().
        Cost: besides the model's own work, one message per micro-batch, cut and direction; large tensors are not copied
            if the ranks share memory.

        Raises:
            ValueError: inputs and targets have different numbers of rows or none; a shape differs between
                micro-batches.
            TypeError: a layer returns a value that can't be sent to the next stage, or the loss is not a tensor.
            RuntimeError: the model was built on the meta device, and some tensors have no values.
            PhalanxError: another stage failed; the message says which, in which micro-batch and layer.
            PeerLostError, DeadlineError: a rank died, or did not answer.
            ClosedError: an earlier step failed.
        """
        self._require_usable()
        loss = self._agree(
            *self._run_actions(args, kwargs, lambda: self._loss.for_target(target, self._result), grad=True)
        )
        with self._step_end.together():
            self._tied.add()
            if self._replicas is not None:
                self._replicas.average()
            self._statistics.update()
            if not self._shared:  # the first step has shown the sizes of the values that are sent
                self._shared = True
                self._wire.share(self._plan(self._micro_batches, True).most_tensors)
        note_loss(loss)
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result for a mini-batch, without gradients; None on ranks without the last stage.

        All ranks call it. With outputs="all" every rank gets the result.

        Shape: that of the model's result for the whole mini-batch (N, ...).

        Raises:
            ValueError, TypeError, PhalanxError: as for `step`; or the micro-batches' results cannot be joined.
        """
        self._require_usable()
        rows: dict[int, int] = {}

        def result_of(micro_batch: int, step: StepPlan, results: dict[fx.Node, Any]) -> Any:
            rows[micro_batch] = step.rows
            return self._result(results)

        work, failure = self._run_actions(args, kwargs, lambda: result_of, grad=False)
        self._agree(work, failure)
        with self._step_end.together():
            self._statistics.update()
        owner = (self._num_stages - 1) % self._size
        result: Any = None
        error: Exception | None = None
        try:
            if self._rank == owner:
                result = batches.join([work.results[i] for i in sorted(rows)], [rows[i] for i in sorted(rows)])
        except (TypeError, ValueError) as refused:
            error = refused
        if self._all_outputs:
            with self._step_end.together():
                result = share_result(result if error is None else error, self._group, owner)
            error = result if isinstance(result, (TypeError, ValueError)) else None
        if error is not None:
            raise error
        return result

    def _run_actions(
        self, args: Sequence[Any], kwargs: dict[str, Any], finish: Callable[[], Callable[..., Any]], *, grad: bool
    ) -> tuple[StepWork, Exception | None]:
        """Run this rank's actions of a step; return its work, and the error, if any, that the ranks must agree on."""
        work = StepWork(
            training=self.training,
            grad=grad,
            recompute=self._checkpoint,
            statistics=self._statistics,
            plan=lambda micro_batches: self._plan(micro_batches, grad),
            finish=finish(),
        )
        step = self._step
        step.start()
        try:
            self._wire.begin(grad=grad)
            self._outcome.begin()
            if self._rank == 0:
                self._cut_inputs(work, args, kwargs)
            if grad:
                self._tied.begin()
            self._executor.run(work)
        except BaseException as error:
            self._statistics.forget()
            if not step.has_failed:  # interrupted before its first action, or after its last
                self._executor.refuse(error)
            if isinstance(error, Exception) and step.phase is StepPhase.FAILED:
                return work, error
            step.leave(error)
            peer = None if step.awaited is None else self._rank_of(step.awaited)
            self._outcome.leave(lost=isinstance(error, Exception), peer=peer)
            self._wire.leave()
            raise
        return work, None

    def _agree(self, work: StepWork, error: Exception | None) -> Tensor:
        """Return the loss of a step that all ranks completed; zero for an evaluation, which has none."""
        loss = None
        if error is None and work.grad and (self._num_stages - 1) % self._size == self._rank:
            loss = torch.stack([work.results[i] for i in sorted(work.results)]).sum()
        try:
            loss = self._outcome.share(loss, error, replicas=work.grad)
            mode = work.grad, work.training
            seen = (stage.seen[mode] for stage in self._executor.stages.values() if mode in stage.seen)
            self._copies.require_current(mode, seen, self._group)
            with self._step_end.together():
                # only now, as all ranks have completed their part: a failed rank would never receive the messages
                self._wire.wait_sent()
            self._wire.end_step()
            return loss
        except BaseException as failure:
            self._step.give_reason(failure)
            if self._step.phase is StepPhase.ABORTED:  # every failed rank has notified the ranks with posted receives
                self._wire.end_receives()
            else:
                self._step_end.leave(failure)
            self._statistics.forget()
            raise

    def _cut_inputs(self, work: StepWork, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            rows = batches.count_rows((args, kwargs), "the input")
            values = bind(self._layers, args, kwargs)
            work.rows = batches.cut(rows, self._micro_batches)
            work.inputs = batches.slice_each(values, work.rows)
        except Exception as error:  # the others wait for these inputs
            raise self._executor.refuse(error) from error.__cause__

    def _plan(self, micro_batches: int, grad: bool) -> PipelineSchedule:
        return plan_schedule(self._schedule, self._size, micro_batches, self._num_stages, training=grad)

    def _rank_of(self, stage: int) -> int:
        return self._plan(self._micro_batches, True).rank_of(stage)

    def _result(self, results: dict[fx.Node, Any]) -> Any:
        return fx.node.map_arg(self._layers.output.args[0], lambda node: results[node])

    def _require_usable(self) -> None:
        if not self._step.may_start:
            raise ClosedError(
                f"Pipeline: an earlier step failed ({self._step.reason or 'it was interrupted'}), and its messages may "
                "still be in flight. Make a new Pipeline, with a new process group if a rank was lost."
            )
        if self._without_values:
            raise RuntimeError(
                f"Pipeline: the model was built on the meta device, and there are no values for "
                f"{', '.join(self._without_values)}. Load a state_dict, or pass init_fn=."
            )
        self._layers.constants.warn_of_changes(self._layers.root)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients by the norm over the whole model, as `torch.nn.utils.clip_grad_norm_` does. All ranks call it.

        Return the norm before clipping, on every rank.

        Raises:
            ValueError: max_norm is below zero.
        """
        parameters = list(self._own.parameters())
        return clip(parameters, self._tied.counted_here(parameters), max_norm, self._group)

    def extra_repr(self) -> str:
        """Return the table of the cut."""
        return f"schedule={self._schedule!r}, micro_batches={self._micro_batches}\n{self.plan}"


def clip(
    parameters: Sequence[nn.Parameter], counted: Sequence[nn.Parameter], max_norm: float, group: dist.ProcessGroup
) -> Tensor:
    """Clip the gradients of this rank's parameters; return the norm before clipping, equal on all ranks. Collective.

    Arguments:
        counted: the part of `parameters` that this rank adds to the norm; only one rank adds a shared parameter.

    Raises:
        ValueError: max_norm is below zero.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be 0 or more, got {max_norm}")
    squares = torch.zeros((), dtype=torch.float64, device="cpu")
    for parameter in counted:
        if parameter.grad is not None:
            grad = parameter.grad.detach()
            values = grad.coalesce().values() if grad.is_sparse else grad
            if values.is_complex():  # |a + bi| squared is a squared plus b squared
                values = torch.view_as_real(values.resolve_conj())
            squares += values.double().square().sum().cpu()
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    # NaN if the norm is NaN, as in torch
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm.float()


class Loss:
    """A `Loss` computes the loss on the last stage: `loss_fn` of result and target, or else the result itself."""

    def __init__(self, loss_fn: Callable[..., Tensor] | None, *, mean: bool) -> None:
        """Use `loss_fn`. With `mean`, it averages over samples, so each micro-batch is weighted by its rows."""
        self._loss_fn = loss_fn
        self._mean = mean

    def for_target(self, target: Any, result: Callable[[dict[fx.Node, Any]], Any]) -> Callable[..., Tensor]:
        """Return a function that computes a micro-batch's loss; it is called in order, and again on recomputation."""
        begins = {0: 0}

        def loss_of(micro_batch: int, step: StepPlan, results: dict[fx.Node, Any]) -> Tensor:
            begins[micro_batch + 1] = begins[micro_batch] + step.rows
            output = result(results)
            if self._loss_fn is None:
                loss = output
            else:
                if micro_batch == 0 and target is not None:
                    rows = batches.count_rows(target, "the target")
                    if rows != step.all_rows:
                        raise ValueError(f"the target has {rows} rows, the input {step.all_rows}")
                part = batches.slice_rows(target, begins[micro_batch], step.rows)
                loss = self._loss_fn(output, part) if target is not None else self._loss_fn(output)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                whose = "the model's result, without a loss_fn," if self._loss_fn is None else "loss_fn's result"
                raise TypeError(f"{whose} must be the loss, a tensor with one number, got {what}")
            return loss.reshape(()) * (step.rows / step.all_rows if self._mean else 1.0)

        return loss_of


def materialize(own: nn.Module, device: torch.device, init_fn: Callable[[str, Tensor], object] | None) -> list[str]:
    """Allocate every meta tensor of `own`, and initialize it by its module's `reset_parameters` or else by `init_fn`.

    Tensors that two modules share stay shared. Return the names of tensors that nothing initialized; they are zero.
    """
    new: dict[int, Tensor] = {}
    made: dict[str, nn.Module] = {}
    for path, module in own.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in new:
                    data = torch.zeros_like(tensor, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    new[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
                tensors[name] = new[id(tensor)]
                made[f"{path}.{name}" if path else name] = module
    for module in dict.fromkeys(made.values()):
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    # `reset_parameters` may skip a buffer that the constructor fills, such as a mask.
    left = [name for name, module in made.items() if not hasattr(module, "reset_parameters") or _is_unset(own, name)]
    if init_fn is not None:
        with torch.no_grad():
            for name in left:
                init_fn(name, _tensor(own, name))
        return []
    return left


def _is_unset(own: nn.Module, name: str) -> bool:
    """Return whether `name` is a buffer that nothing has written since `materialize` gave it memory."""
    tensor = _tensor(own, name)
    return not isinstance(tensor, nn.Parameter) and tensor._version == 0 and not tensor.any()


def _tensor(own: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(own.get_submodule(owner), last)
    return found


class StepEndFailure:
    """A `StepEndFailure` reports an error after a rank's last action: it aborts the groups, or notifies neighbours."""

    def __init__(self, outcome: StepOutcome, wire: Wire, executor: Executor, step: StepProgress) -> None:
        self._outcome, self._wire, self._executor, self._step = outcome, wire, executor, step

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Notify the other ranks of errors in this block, which all ranks run after their agreement."""
        try:
            yield
        except BaseException as error:
            self._step.leave(error)
            self._outcome.abort(error)
            if self._outcome.needs_notices:
                self._executor.notify_end(error)
                self._wire.leave()
            raise

    def leave(self, failure: BaseException) -> None:
        """Leave the pipeline. If only this rank has failed, notify the others: they may be in the next step already.

        A rank that failed in an action has notified them before.
        """
        phase = self._step.phase
        self._step.leave(failure)
        is_shared = isinstance(failure, (StageFailedError, StageLostError))  # these errors reach all ranks
        is_first = phase in (StepPhase.COMPLETED, StepPhase.AGREED) and not is_shared
        if is_first and isinstance(failure, RuntimeError) and self._outcome.needs_notices:
            if phase is StepPhase.AGREED:
                self._outcome.abort(failure)
            self._executor.notify_end(failure)
        self._wire.leave()
