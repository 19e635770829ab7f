"""Provide the undocumented attributes and methods of PyTorch's DDP that libraries use, or refuse with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from phalanx.ddp.plan import BucketPlan
from phalanx.ddp.reducer import Reducer
from phalanx.ddp.replicate import broadcast_tensors
from phalanx.nn.sync_batchnorm import SyncBatchNorm


class TorchInterface(nn.Module):
    """`TorchInterface` provides private and undocumented attributes and methods of PyTorch's wrapper."""

    process_group: dist.ProcessGroup
    module: nn.Module
    device: torch.device
    dim: int
    device_ids: Sequence[int | torch.device] | None
    static_graph: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    broadcast_buffers: bool
    require_backward_grad_sync: bool
    register_comm_hook: Callable[[object, Any], None]
    _reducer: Reducer
    _buffers_stale: bool
    _ignored: frozenset[str]
    _caps_mb: Sequence[float]
    _comm_hook: tuple[object, Any] | None
    if TYPE_CHECKING:

        def _synced_buffers(self) -> list[Tensor]: ...
        def _moved(self, values: Any) -> Any: ...

    # -- attributes ----------------------------------------------------------------------------------------------------

    @property
    def device_type(self) -> str:
        """Return the type of the module's device."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Return False: a wrapped module is on one device."""
        return False

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Return the names of the parameters and buffers that the wrapper leaves alone."""
        return set(self._ignored)

    @property
    def bucket_bytes_cap(self) -> int:
        """Return the size in bytes at which the plan closes a bucket."""
        return int(self._caps_mb[-1] * 1024 * 1024)

    @property
    def forward_sync_buffers(self) -> bool:
        """Return the setting `broadcast_buffers`."""
        return self.broadcast_buffers

    @property
    def require_forward_param_sync(self) -> bool:
        """Return whether buffers may have changed since the last broadcast; the next forward then copies rank 0's."""
        return self._buffers_stale

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._buffers_stale = value

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Return the buffers that are overwritten with rank 0's."""
        return self._synced_buffers()

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward copies rank 0's buffers."""
        return self.broadcast_buffers and self._buffers_stale and bool(self.modules_buffers)

    # -- settings ------------------------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Switch to static_graph=True. All ranks call this after construction, before the first backward.

        Raises:
            RuntimeError: training has begun.
        """
        if self.static_graph:
            warnings.warn("static_graph is True already", stacklevel=2)
            return
        self._reducer.set_static_graph()
        self.static_graph = True

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Exclude parameters and buffers when `module` is wrapped, for example experts that exist on one rank only."""
        module._ddp_params_and_buffers_to_ignore = list(params_and_buffers_to_ignore)  # type: ignore[assignment]

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Register the Python version of one of PyTorch's built-in C++ hooks."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        fp16 = comm_hook_type == BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if fp16 else default_hooks.allreduce_hook
        self.register_comm_hook(self.process_group, hook)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Check the rate and ignore it: the wrapper measures no times. `torch.profiler` shows the parts of a step.

        Raises:
            ValueError: the rate is below 1, as in PyTorch.
        """
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are returned to the caller unchanged."""

    # -- logging data --------------------------------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return PyTorch's dictionary of settings, buckets and steps, without timings."""
        plan: BucketPlan = self._reducer.plan
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        sizes = ", ".join(str(bucket.num_bytes) for bucket in plan.buckets)
        indices = "; ".join(" ".join(str(slot.parameter) for slot in bucket.slots) for bucket in plan.buckets)
        num_steps = self._reducer.num_rounds
        found: dict[str, Any] = {
            "backend_name": dist.get_backend(self.process_group),
            "module_name": type(self.module).__name__,
            "rank": self.process_group.rank(),
            "world_size": self.process_group.size(),
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "dtypes": ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})),
            "iteration": num_steps,
            "num_parameter_tensors": len(trained),
            "total_parameter_size_bytes": sum(parameter.nbytes for parameter in trained),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": sizes,
            "static_graph": int(self.static_graph),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "broadcast_buffers": int(self.broadcast_buffers),
            "has_sync_bn": int(any(isinstance(m, (SyncBatchNorm, nn.SyncBatchNorm)) for m in self.module.modules())),
            "is_multi_device_module": 0,
            "comm_hook": "set" if self._comm_hook is not None else "",
        }
        if num_steps:
            found |= {
                "has_rebuilt_buckets": int(not self._reducer.rebuild_pending),
                "rebuilt_bucket_sizes": sizes,
                "rebuilt_per_bucket_param_indices": indices,
                "num_buckets_reduced": len(plan.buckets),
            }
        return found

    # -- parts of PyTorch's forward, for subclasses that write their own -----------------------------------------------

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        """Split tensors along `dim`, one part for each device, as torch.nn.parallel.scatter does."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int | torch.device) -> Any:
        """Move the arguments to the wrapper's device; return each as a one-element tuple, since there is one device."""
        return (self._moved(inputs),), (self._moved(kwargs),)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Concatenate outputs of several devices along `dim`, as torch.nn.parallel.gather does."""
        return gather(outputs, output_device, dim=self.dim)

    def _sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks now. All ranks call it."""
        broadcast_tensors(self._synced_buffers(), self.process_group, 0)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Return False: gradients are averaged when backward returns. Setting it to True raises an error."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._check_manual_backward_finalization_supported()

    @property
    def should_finalize_after_backward(self) -> bool:
        """Return False, since nothing is finalized manually."""
        return False

    def finalize_backward(self) -> NoReturn:
        """Refuse, as PyTorch's method does if `require_manual_backward_finalization` is False.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "finalize_backward: require_manual_backward_finalization is False; gradients are averaged when backward "
            "returns. Remove the call."
        )

    # -- refused -------------------------------------------------------------------------------------------------------

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> NoReturn:
        """Refuse, as `register_comm_hook` refuses hooks that step optimizers inside backward."""
        raise _refused("_register_fused_optim", "optimizers step after backward; call their step()")

    def _register_buffer_comm_hook(self, state: object, hook: Any, comm_hook_location: object = None) -> NoReturn:
        """Refuse, since buffers are either broadcast from rank 0 or not synchronized at all."""
        raise _refused(
            "_register_buffer_comm_hook",
            "pass broadcast_buffers=False, and combine the buffers yourself before forward, or after it",
        )

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> NoReturn:
        """Refuse, since buckets are in memory that the ranks of the group share."""
        raise _refused(
            "_update_process_group",
            "gradients are in memory that the ranks of a group share; wrap the module again, "
            "DistributedDataParallel(ddp.module, process_group=new_process_group)",
        )

    def _check_manual_backward_finalization_supported(self) -> NoReturn:
        """Refuse, since backward returns only after all buckets are averaged."""
        raise _refused(
            "require_manual_backward_finalization",
            "gradients are averaged when backward returns; put code that should overlap into a parameter's hook",
        )

    def _set_sparse_metadata(self, global_unique_ids: object) -> NoReturn:
        """Refuse, since ranks exchange the rows of sparse gradients in every step."""
        raise _refused(
            "_set_sparse_metadata", "the rows of sparse gradients are exchanged in every step; remove the call"
        )


def _refused(name: str, advice: str) -> NotImplementedError:
    return NotImplementedError(f"DistributedDataParallel.{name} is not supported: {advice}")
