"""Wrap a module for data parallel training: `DistributedDataParallel`."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh

from phalanx._base.malloc import keep_freed_memory
from phalanx._base.torch_names import find
from phalanx._comm.backend.dynamo import skipped, untraced
from phalanx._comm.backend.shared import require_group
from phalanx._comm.transport.tensors import move_batch
from phalanx.ddp.batchnorm import SyncChoice, check_choice, span_ranks, sync_if_small
from phalanx.ddp.comm_hook import Hook, HookExchange
from phalanx.ddp.epoch_order import EpochOrder, explain_repetition
from phalanx.ddp.first_steps import FirstSteps, warn_of
from phalanx.ddp.graph import tensors_in
from phalanx.ddp.join import JoinInterface
from phalanx.ddp.late_parameters import LateParameters, explain_newcomers
from phalanx.ddp.plan import DEFAULT_CAP_MB, FIRST_CAP_MB, BucketPlan
from phalanx.ddp.reducer import Reducer
from phalanx.ddp.replicate import BufferBroadcast, broadcast_tensors
from phalanx.ddp.structure import describe, refuse_in_backward, refuse_uninitialized, specify, verify_same
from phalanx.ddp.torch_interface import TorchInterface
from phalanx.nn.sync_batchnorm import find_batchnorms

_backward_number: Any = find(
    "torch._C._current_graph_task_id",
    loses="a forward inside a backward (checkpointing), or after a failed backward, is not detected",
    instead=lambda: -1,
)

_PREFIX = "module."


class DistributedDataParallel(JoinInterface, TorchInterface):
    """Train one model on many ranks: each rank computes gradients on its own batch, and backward averages them.

    Replaces `torch.nn.parallel.DistributedDataParallel` on any backend of `torch.distributed`. On the backend
    `"phalanx"`, ranks that share memory reduce gradients in place. Construction is collective: all ranks pass the same
    model, and receive rank 0's parameters and buffers.

    The arguments are PyTorch's, with these differences. `gradient_as_bucket_view` defaults to True: backward makes
    `.grad` a view of a bucket, even if you had assigned another tensor. The next backward writes to that view, unless
    you keep a reference to it and set `.grad` to None. `batched_grad_copy`, `lazy_bucket_allocation` and `dim` have no
    effect. An unsupported argument raises an error that names it. Gradients are averaged once per backward, not once
    per forward: two forwards followed by their two backwards give the correct mean.

    A forked child shares the memory of `.grad` with its parent (no copy-on-write). Before the fork, clone the gradients
    that the child will read.

    Phalanx adds two arguments. With `sync_batchnorm=True` BatchNorm layers normalize over all ranks' batches
    (`phalanx.SyncBatchNorm`); with "auto" they do so if any rank's first batch has fewer than 16 samples, and rank 0
    logs the choice. With `check=True`, the default, the wrapper detects common mistakes in the first 3 steps (for
    example, that every rank reads the same batch), and an unchanged order of batches in the first 1000. Rank 0 logs one
    warning for each; `phalanx docs mistakes` lists them.

    Names follow the module tree, as in PyTorch: the wrapped module is the child `module`, and the keys of
    `state_dict()` begin with `module.`; the keys of `ddp.module.state_dict()` do not. `load_state_dict` accepts both.

    Numerics: parameters are bitwise identical on all ranks, in every run; two ranks with half a batch each train like
    one process with the whole batch, up to rounding, if the loss is a mean over samples.

    Raises:
        ValueError: an argument is not supported, or disagrees with the module's devices.
        RuntimeError: there is no process group, or no parameter requires a gradient. In forward: a parameter was added
            or unfrozen since construction, or got no gradient in the last backward. In an optimizer's step: gradients
            were not averaged, because no forward of the wrapper preceded their backward.
        MismatchError: the ranks' models or settings differ; raised on all ranks.

    Source: Li et al. (2020), PyTorch Distributed: Experiences on Accelerating Data Parallel Training.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        sync_batchnorm: SyncChoice = False,
        check: bool = True,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)  # Join actions stay disabled until a Join context enables them
        refuse(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        if check_reduction:
            warnings.warn("check_reduction has no effect: reduction is always checked", FutureWarning, stacklevel=2)
        check_choice(sync_batchnorm)
        self._caps_mb = caps_mb = decide_caps(bucket_cap_mb, bucket_cap_mb_list)
        self.process_group = decide_group(process_group, device_mesh)
        if device_mesh is not None:
            localize(module, device_mesh)
        self.module = module
        self.dim = dim
        self.device_ids = device_ids
        self.output_device = output_device
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        # PyTorch has two names for this setting. Only forward_sync_buffers=False still broadcasts at construction.
        given = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.broadcast_buffers = True if given is None else given
        self._divide_by_initial_world_size = True
        self._buffers_stale = True  # ranks' buffers may differ since the last training forward

        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = [(name, p) for name, p in module.named_parameters() if name not in self._ignored]
        refuse_uninitialized(named)
        refuse_in_backward(named)
        device = named[0][1].device if named else torch.device("cpu")
        if device.type == "cpu":
            keep_freed_memory()
        if init_sync:
            settings = {
                "bucket caps in MiB": caps_mb,
                "find_unused_parameters": find_unused_parameters,
                "static_graph": static_graph,
                "broadcast_buffers": self.broadcast_buffers,
                "sync_batchnorm": sync_batchnorm,
                "BatchNorm layers": len(find_batchnorms(module)),  # `describe` misses those without any tensor
                "check": check,
            }
            verify_same(describe(module, self._ignored), settings, self.process_group, device)
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if not trained:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
                "gradient: use the module without it"
            )
        if sync_batchnorm is True:
            span_ranks(module, self.process_group)
        self._batchnorm_undecided = sync_batchnorm == "auto"
        self._batchnorm_synced = False  # whether "auto" has converted the BatchNorm layers
        self._inputs_to = decide_device({parameter.device for _, parameter in named}, device_ids, output_device)
        self.device = device
        if init_sync:
            tensors: list[Tensor] = [parameter for _, parameter in named]
            if self.broadcast_buffers or forward_sync_buffers is not None:
                tensors += self._synced_buffers()
            broadcast_tensors(tensors, self.process_group)
        parameters = [parameter for _, parameter in trained]
        watched = check and self.process_group.size() > 1
        self._trained = trained
        self._comm_hook: tuple[object, Hook] | None = None
        self._reducer = self._build_reducer(
            FirstSteps([name for name, _ in trained], parameters, self.process_group) if watched else None
        )
        self._buffer_broadcast = BufferBroadcast(self.process_group)
        self._late_parameters = LateParameters(module, parameters, self._ignored)
        self._epoch_order = EpochOrder() if watched and self.process_group.rank() == 0 else None
        self.register_load_state_dict_pre_hook(_restore_prefix)  # type: ignore[no-untyped-call]

    def _build_reducer(self, watch: FirstSteps | None) -> Reducer:
        parameters = [parameter for _, parameter in self._trained]
        return Reducer(
            specify(self.module, self._trained),
            parameters,
            caps_mb=self._caps_mb,
            group=self.process_group,
            as_view=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            watch=watch,
            accumulates=functools.partial(_accumulates, weakref.ref(self)),
        )

    def regroup(self, process_group: dist.ProcessGroup) -> None:
        """Move the wrapper to another group, and drop all gradients. All ranks of `process_group` call this.

        The next backward records the order of gradients and the static graph again, since new ranks do not know them.
        The caller synchronizes parameters and buffers. In a comm hook's state, only `process_group` is updated.

        Cost: that of the constructor, without its broadcast.
        """
        old, self.process_group = self.process_group, process_group
        self._reducer.close()
        for _, parameter in self._trained:
            parameter.grad = None
        for layer in self.module.modules():
            if getattr(layer, "process_group", None) is old:
                layer.process_group = process_group  # type: ignore[assignment]
        self._reducer = self._build_reducer(None)
        self._buffer_broadcast = BufferBroadcast(process_group)
        self._epoch_order = None
        self._buffers_stale = True
        if self._comm_hook is not None:
            state, hook = self._comm_hook
            if getattr(state, "process_group", None) is old:
                vars(state)["process_group"] = process_group
            self._reducer.use_exchange(HookExchange(state, hook, lambda: len(self.plan.buckets)))

    @property
    def plan(self) -> BucketPlan:
        """Return the assignment of gradients to buckets; `print` shows it. The first backward may replace it."""
        return self._reducer.plan

    @skipped  # torch.compile should compile the module, not this method
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, and record whether the following backward averages gradients."""
        sync = self._before_forward((args, kwargs))
        if self._inputs_to is not None:
            args, kwargs = self._moved((args, kwargs))
        output = self.module(*args, **kwargs)
        self._after_forward(output, sync)
        return output

    @untraced
    def _before_forward(self, inputs: object) -> bool | None:
        """Return whether the backward of this forward averages gradients; None if this forward does not decide that."""
        reducer = self._reducer
        if reducer.in_backward and _backward_number() != -1:
            return None  # checkpointing runs the forward again during its backward
        grad_enabled = torch.is_grad_enabled()
        sync = grad_enabled and self.require_backward_grad_sync
        source = self._announce(sync) if self._join_config.enable else 0
        if sync:
            reducer.prepare_forward()
            newcomers = self._late_parameters.find_newcomers()
            if newcomers:
                raise RuntimeError(explain_newcomers(newcomers, self.process_group.rank()))
            self._inspect_batch(inputs)
        elif grad_enabled and _backward_number() == -1:
            reducer.end_interrupted_backward()
        if self.broadcast_buffers and self._buffers_stale:
            if self._join_config.enable:
                broadcast_tensors(self._synced_buffers(), self.process_group, source)
            else:
                self._buffer_broadcast.from_first(self._synced_buffers(), reducer.num_rounds)
        # As in PyTorch, the forward after a training forward starts from rank 0's buffers, even in eval mode.
        self._buffers_stale = sync
        return sync if grad_enabled else None

    def _inspect_batch(self, inputs: object) -> None:
        """Decide sync_batchnorm="auto" from the first training batch, and watch the inputs for mistakes."""
        if self._batchnorm_undecided and self.training:
            self._batchnorm_undecided = False
            self._batchnorm_synced = sync_if_small(self.module, tensors_in(inputs), self.process_group, self.device)
        if _backward_number() != -1:
            return  # checkpointing runs the forward again
        if self._reducer.watch is not None:
            self._reducer.watch.before_forward(inputs)
        if self._epoch_order is not None:
            if self._epoch_order.repeats(inputs):
                warn_of(explain_repetition(self._epoch_order.num_steps))
            if self._epoch_order.disabled:
                self._epoch_order = None

    @untraced
    def _after_forward(self, output: object, sync: bool | None) -> None:
        if sync is None:
            return
        outputs = tensors_in(output)
        if sync and self._reducer.watch is not None and _backward_number() == -1:
            self._reducer.watch.after_forward(outputs)
        self._reducer.prepare_backward(outputs, sync=sync)

    def _moved(self, values: Any) -> Any:
        return values if self._inputs_to is None else move_batch(values, self._inputs_to)

    def _synced_buffers(self) -> list[Tensor]:
        return [buffer for name, buffer in self.module.named_buffers() if name not in self._ignored]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate local gradients without averaging; the first backward outside the context averages the sums.

        Call the forward inside the context, too: the forward decides whether its backward averages.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def batchnorm_choice(self) -> tuple[bool, bool]:
        """Return whether `sync_batchnorm="auto"` is undecided, and whether BatchNorm layers span the ranks."""
        return self._batchnorm_undecided, self._batchnorm_synced

    def follow_batchnorm_choice(self, choice: tuple[bool, bool]) -> None:
        """Adopt the decision of another rank's wrapper."""
        undecided, synced = choice
        if synced and not self._batchnorm_synced:
            span_ranks(self.module, self.process_group)
        self._batchnorm_undecided, self._batchnorm_synced = bool(undecided), bool(synced)

    def _state(self) -> list[Tensor]:
        """Return the tensors that ranks synchronize: parameters, and buffers unless each rank has its own."""
        named = [(name, parameter) for name, parameter in self.module.named_parameters() if name not in self._ignored]
        tensors: list[Tensor] = [parameter for _, parameter in named]
        return tensors + self._synced_buffers() if self.broadcast_buffers else tensors

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Reduce each bucket with `hook(state, bucket)` instead of all_reduce; the hook returns a future of a tensor.

        This is PyTorch's interface, and most hooks of torch.distributed.algorithms.ddp_comm_hooks work. The hook
        receives gradients that are not yet divided by the number of ranks. Call this once per module, before the first
        backward.

        Raises:
            TypeError: `hook` is not callable.
            ValueError: `hook` is a PyTorch hook that cannot work here; `phalanx docs data-parallel` lists those hooks.
            RuntimeError: a hook is already registered, or a parameter has sparse gradients.
        """
        refuse_hook(hook, dist.get_backend(self.process_group))
        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook can only be called once per module")
        sparse = [bucket.slots[0].name for bucket in self.plan.buckets if bucket.sparse]
        if sparse:
            raise RuntimeError(f"register_comm_hook: {sparse[0]!r} has sparse gradients, which hooks do not support")
        self._comm_hook = (state, hook)
        self._reducer.use_exchange(HookExchange(state, hook, lambda: len(self.plan.buckets)))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the wrapped module, whose keys all have PyTorch's prefix `module.`, or all lack it.

        Raises:
            ValueError: `assign=True`, which would replace the parameters whose gradients are in buckets.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would replace the parameters of the buckets: load into "
                "the module first, then wrap it"
            )
        if _is_bare(self.module.state_dict().keys(), state_dict.keys()):
            return self.module.load_state_dict(state_dict, strict=strict)  # `_metadata` has the same names as the keys
        return super().load_state_dict(state_dict, strict=strict)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "DistributedDataParallel cannot be pickled or copied: it has a process group and memory shared with other "
            "ranks. Save ddp.state_dict(), or pickle or copy ddp.module"
        )


def _accumulates(ddp: weakref.ref[DistributedDataParallel]) -> bool:
    alive = ddp()
    return alive is not None and not alive.require_backward_grad_sync


def _is_bare(own: Collection[str], keys: Collection[str], prefix: str = "") -> bool:
    """Return whether a state dict's keys after `prefix` are the module's `own` keys, without `module.` in front.

    A wrapped module may have its own child named `module`, so one key alone does not decide.
    """
    wrapped = sum(prefix + _PREFIX + key in keys for key in own)
    return wrapped < sum(prefix + key in keys for key in own)


def _restore_prefix(ddp: DistributedDataParallel, state_dict: dict[str, Any], prefix: str, *_unused: Any) -> None:
    """Accept keys with and without `module.` when a module that contains the wrapper loads a state dict."""
    own = ddp.module.state_dict().keys()
    if _is_bare(own, state_dict.keys(), prefix):
        bare = {key: state_dict.pop(prefix + key) for key in own if prefix + key in state_dict}
        state_dict.update({prefix + _PREFIX + key: value for key, value in bare.items()})


_REFUSED = {
    "delay_all_reduce_named_params": "it is internal to PyTorch; freeze the parameters to leave out",
    "param_to_hook_all_reduce": "it is internal to PyTorch",
    "mixed_precision": "use torch.autocast around forward, and the hook bf16_compress_hook to send fewer bytes",
    "skip_all_reduce_unused_params": "whole buckets are sent; freeze parameters that are never used",
}

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
# PyTorch's hooks that cannot work here, by module.
_REFUSED_HOOKS = {
    _HOOKS + "mixed_precision_hooks": "it is a part of PyTorch's own DistributedDataParallel(mixed_precision=...). "
    "Use torch.autocast around forward, and bf16_compress_hook to send fewer bytes",
    _HOOKS + "ddp_zero_hook": "it uses PyTorch's reducer to overlap a broadcast with backward. Use "
    "phalanx.ZeroRedundancyOptimizer without a hook: on one host, that optimizer broadcasts nothing",
    _HOOKS + "optimizer_overlap_hooks": "it steps optimizers inside backward, through PyTorch's own reducer. Call the "
    "optimizer's step() after backward",
}
_NEEDS_NCCL = {
    _HOOKS + "quantization_hooks": "it expects the future of NCCL's all_gather, and fails on every other backend, "
    "also with PyTorch's DistributedDataParallel. On Gloo, use bf16_compress_hook; on 'phalanx', "
    "phalanx.Options(wire_dtype=torch.bfloat16)",
}
_RESIZES = {
    "batched_powerSGD_hook": "it resizes the bucket, whose memory cannot grow. Use powerSGD_hook",
}


def refuse_hook(hook: Callable[..., Any], backend: str) -> None:
    """Refuse PyTorch's communication hooks that cannot work here, before a backward fails in them.

    Raises:
        TypeError: `hook` is not callable.
        ValueError: `hook` cannot work here; the message names an alternative.
    """
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {type(hook).__name__}")
    plain = getattr(hook, "func", hook)  # one of PyTorch's hooks is a functools.partial
    module, name = getattr(plain, "__module__", "") or "", getattr(plain, "__name__", repr(plain))
    reason = _REFUSED_HOOKS.get(module)
    if reason is None and backend != "nccl":
        reason = _NEEDS_NCCL.get(module)
    if reason is None and module == _HOOKS + "powerSGD_hook":
        reason = _RESIZES.get(name)
    if reason is not None:
        raise ValueError(f"DistributedDataParallel does not support the communication hook {name}: {reason}")


def refuse(**given: object) -> None:
    """Refuse the unsupported arguments in `given` that are set, all in one message.

    Raises:
        ValueError: at least one argument is set.
    """
    reasons = [f"{name}: {_REFUSED[name]}" for name, value in given.items() if value]
    if reasons:
        raise ValueError("DistributedDataParallel does not support " + "; ".join(reasons))


def decide_caps(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> tuple[float, ...]:
    """Return the caps of the first, second, ... bucket in MiB; the last cap applies to all later buckets.

    Raises:
        ValueError: a cap is not above zero.
    """
    caps: tuple[float, ...]
    if bucket_cap_mb_list:
        caps = tuple(bucket_cap_mb_list)
    elif bucket_cap_mb is None:
        caps = (FIRST_CAP_MB, DEFAULT_CAP_MB)
    else:
        caps = (bucket_cap_mb,)
    if any(not cap > 0 for cap in caps):
        raise ValueError(f"bucket_cap_mb must be above 0 MiB, got {caps[0] if len(caps) == 1 else caps}")
    return caps


def decide_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the group to average over: the given one, the mesh's, or the default group.

    Raises:
        ValueError: both a group and a mesh are given, or the mesh does not have exactly one axis.
        RuntimeError: neither is given, and there is no default group.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("DistributedDataParallel takes either process_group or device_mesh, not both")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(f"DistributedDataParallel takes a device_mesh of one axis, got {device_mesh.ndim} axes")
        return device_mesh.get_group(0)
    return require_group(process_group, "DistributedDataParallel")


def localize(module: nn.Module, device_mesh: DeviceMesh) -> None:
    """Replace DTensor parameters by their local tensors outside of forward, as PyTorch's wrapper does.

    Do nothing unless the mesh is one axis of a larger mesh, whose other axes are for tensor parallelism.
    """
    if device_mesh._get_root_mesh() != device_mesh:
        transform: Any = find(
            "torch.distributed.tensor.parallel.ddp._pre_dp_module_transform",
            loses="DistributedDataParallel does not train tensor-parallel models",
        )
        transform(module)


def decide_device(
    devices: set[torch.device],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> torch.device | None:
    """Return the device to which the wrapper moves inputs, or None to leave inputs where they are.

    Raises:
        ValueError: the module spans devices, or `device_ids` or `output_device` disagrees with its device.
    """
    if len(devices) > 1:
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"DistributedDataParallel takes a module on one device, but this module is on {where}. Give each "
            "rank one device; to split a model over several devices, use pipelining"
        )
    (device,) = devices
    if not device_ids:
        if output_device is not None:
            raise ValueError(
                f"output_device={output_device} without device_ids: outputs stay where the module is, {device}"
            )
        return None
    if device.type == "cpu" or len(device_ids) > 1:
        raise ValueError(
            f"device_ids={list(device_ids)}: must be None for a module on the CPU, and otherwise a list of the "
            f"module's one device, here {device}"
        )
    wanted = [torch.device(device.type, one) if isinstance(one, int) else torch.device(one) for one in device_ids]
    if output_device is not None:
        wanted.append(
            torch.device(device.type, output_device) if isinstance(output_device, int) else torch.device(output_device)
        )
    if any(one != device for one in wanted):
        raise ValueError(f"device_ids and output_device must name the module's device {device}, got {wanted}")
    return device
