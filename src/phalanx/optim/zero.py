"""Share one copy of parameters and optimizer state between all ranks of a host.

              rank 0                        rank 1
backward      mean of all gradients         mean of all gradients        DDP
------------- sync: no rank reads the parameters any more ---------------
step          its slices, its state         its slices, its state        the user's optimizer, on views
------------- sync: all ranks have written -----------------------------
forward       reads all parameters          reads all parameters         the same memory
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from phalanx._base.param_groups import options_of
from phalanx._comm.backend.dynamo import undecorated, untraced
from phalanx._comm.backend.gradient_shards import NeededSlice, find_needed, need_all, need_slice
from phalanx._comm.backend.shared import is_joining, ranks_by_host, require_group, shares_memory
from phalanx.optim.arguments import check_parameters, decide_cut, list_parameters, refuse
from phalanx.optim.master_parameters import MasterParameters
from phalanx.optim.offload import Offload, may_fuse
from phalanx.optim.offloaded_shard import OffloadedShard
from phalanx.optim.parameter_shard import ParameterShard
from phalanx.optim.plan import Slice, plan_cut, plan_whole
from phalanx.optim.sharded_state import ShardedState
from phalanx.optim.shared_parameters import SharedParameters, exempt
from phalanx.optim.staging import HostStaging
from phalanx.optim.state import merge_states
from phalanx.optim.state_backup import StateBackup
from phalanx.optim.undo import Undo


class ZeroRedundancyOptimizer(ShardedState):
    """Shard an optimizer over the ranks of `process_group`, with the name and arguments of PyTorch's class.

    On backend `phalanx`, with all ranks on one host, every parameter moves into memory that the ranks share, with rank
    0's values. Each rank updates its part, and nothing is sent. On several hosts with equally many ranks, at least two
    on each, each host does the same independently, from the same gradients: parameters and state exist once per host.
    On any other group, the call returns an instance of PyTorch's own class, which assigns whole parameters to ranks and
    broadcasts them.

    Collective: all ranks call the constructor, `step`, `add_param_group` and `consolidate_state_dict`.

    Numerics: with the same gradients and one intra-op thread per rank, parameters are bitwise equal to those of a plain
    `optimizer_class`. With element-wise optimizers of torch.optim, parameters are cut between ranks; with all
    others each rank gets whole parameters.
    Cost: two barriers per step, and one copy of each slice, from which survivors undo the update if a rank dies.

    Code that writes to a parameter outside of `step` writes for all ranks, even while another rank reads: call a
    barrier, write on one rank, and call a barrier again. A module's `load_state_dict` waits for the other ranks itself.
    A forked child sees every later step: before the fork, clone the parameters that the child will read. `all_reduce`
    of a parameter raises an error.

    Arguments:
        params: parameters, named parameters, or groups, as for any optimizer; the same on every rank.
        optimizer_class: a class of optimizers; LBFGS is refused.
        process_group: the default group if None. The attribute `process_group` is the group of this host's ranks.
        parameters_as_bucket_view: has no effect; parameters are always views of shared memory.
        overlap_with_ddp: refused, because there is no broadcast to overlap.
        gather_gradients: an addition of Phalanx. With False, `DistributedDataParallel` writes the mean of a large
            gradient (256 KiB or more) only into the slices that this rank updates, and leaves the rank's own gradient
            in the rest. Clip with this class's `clip_grad_norm_`, and let `zero_grad` set gradients to None; calls that
            would use wrong values are refused. It has no effect on several hosts or other groups.
        offload: an addition of Phalanx. With True, parameters stay on their device, usually a GPU, and each rank has
            its own. Their masters (float32 copies of float16 and bfloat16 parameters; else of the parameter's dtype)
            and the optimizer's state are in the host's memory, once for all its ranks. `step` copies this rank's slices
            of the gradients there and updates its slices of the masters on the CPU, with torch's fused kernels unless
            `fused` or `foreach` is given; then all new parameters are copied to every device. `step` uses the current
            parameters and gradients, whichever code has changed them.
        defaults: options of `optimizer_class`.

    Raises:
        ValueError, TypeError: an argument is invalid or not supported; two parameters share memory.
        MismatchError: ranks pass different parameters.

    Source: Rajbhandari et al. (2020), ZeRO stage 1; parameters that exist once per host are an addition of Phalanx.
    """

    def __new__(
        cls,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        gather_gradients: bool = True,
        offload: bool = False,
        **defaults: Any,
    ) -> Any:
        """Return an instance of this class if the ranks of each host share memory, otherwise of PyTorch's class."""
        group = require_group(process_group, "ZeroRedundancyOptimizer")
        if shares_memory(group) or is_joining(group) or divide_by_host(group):
            return super().__new__(cls)
        if offload:
            raise ValueError(
                "ZeroRedundancyOptimizer: offload=True needs a process group of backend 'phalanx' on one host, or on "
                "several hosts with equally many ranks, at least two on each. Otherwise pass process_group="
                "dist.new_group(ranks of this host); each host then updates all parameters, from the same gradients."
            )
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer

        return TorchZeroRedundancyOptimizer(
            params, optimizer_class, process_group, parameters_as_bucket_view, overlap_with_ddp, **defaults
        )

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        gather_gradients: bool = True,
        offload: bool = False,
        **defaults: Any,
    ) -> None:
        self._cut = decide_cut(optimizer_class)
        refuse(overlap_with_ddp, defaults)
        self._all_hosts = self.process_group = require_group(process_group, "ZeroRedundancyOptimizer")
        if on_host := divide_by_host(self._all_hosts):
            self.process_group = make_host_group(self._all_hosts, on_host)
            gather_gradients = True
        self.rank: int = self.process_group.rank()
        self.world_size: int = self.process_group.size()
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.gather_gradients = gather_gradients
        # If True, GradScaler passes `found_inf` to `step`, which refuses it.
        self._step_supports_amp_scaling = not gather_gradients and self.world_size > 1
        self.offload = offload
        self._optimizer_class = optimizer_class
        self._given = dict(defaults)  # `defaults` of AdamW have an option that its constructor does not accept
        self._undo = Undo(self.process_group) if self.world_size > 1 else None
        self._offload = self._new_offload()
        self._fuses: list[bool] = []  # by group: whether this class has chosen fused kernels
        self._shared: list[SharedParameters | MasterParameters] = []
        self._shards: list[list[ParameterShard] | list[OffloadedShard]] = []  # this rank's shards of each group
        self._local: Optimizer | None = None
        self._backup: StateBackup | None = None
        self._moving: tuple[int, dict[int, Any] | None] | None = (
            None  # updates and state during a move to another group
        )
        self._consolidated = False
        params, self._given_parameters = list_parameters(params)  # the parameters of all groups, before any has moved
        exempt(self)
        super().__init__(params, defaults)  # adds the groups
        self._given_parameters = []

    # -- parameters ----------------------------------------------------------------------------------------------

    @untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, and divide its update between the ranks. All ranks call this."""
        undecorated(Optimizer.add_param_group)(self, param_group)
        group = self.param_groups[-1]
        try:
            others = [*self._given_parameters, *(p for other in self.param_groups[:-1] for p in other["params"])]
            check_parameters(group["params"], self._all_hosts, offload=self.offload, others=others)
        except BaseException:
            self.param_groups.pop()
            raise
        if self.is_on_hosts:
            broadcast_parameters(group["params"], self._all_hosts)
        self._share(group, source=0)

    def _new_offload(self) -> Offload | None:
        return Offload(self.process_group, cut=self._cut, make_staging=HostStaging) if self.offload else None

    def _share(self, group: dict[str, Any], source: int, previous: MasterParameters | None = None) -> None:
        """Share a group's parameters or masters, with the values of rank `source`, and build this rank's optimizer."""
        make_plan = plan_cut if self._cut else plan_whole
        shared: SharedParameters | MasterParameters
        shards: list[ParameterShard] | list[OffloadedShard]
        if self._offload is not None:
            shared, plan, shards = self._offload.share(group["params"], make_plan, source, previous)
        else:
            shared = SharedParameters(group["params"], self.process_group, source)
            plan = make_plan(shared.extents, self.world_size)
            shards = [
                ParameterShard(shared.parameters[part.index], shared.flats[part.index], part)
                for part in plan[self.rank]
            ]
        self._shared.append(shared)
        self._shards.append(shards)
        if self._undo is not None:
            self._undo.cover(shared, plan)
        mine = {part.index: part for part in plan[self.rank]}
        request_gradients(shared.parameters, None if self.gather_gradients else mine, self.process_group)
        local_group = {**options_of(group), "params": [shard.tensor for shard in shards]}
        fuses = self.offload and may_fuse(self._optimizer_class, {**self._given, **local_group}, group["params"])
        self._fuses.append(fuses)
        if fuses:
            local_group["fused"] = True
        if self._local is None:
            self._local = build_local(self._optimizer_class, local_group, self._given, cuts=self._cut)
            exempt(self._local)
            self.defaults = self._local.defaults  # with the class's defaults: schedulers read momentum and betas
        else:
            self._local.add_param_group(local_group)
        self._copy_options_from_local(len(self._fuses) - 1)  # the user may have changed the other groups' options

    def _refuse_moved(self) -> None:
        for number, shared in enumerate(self._shared):
            moved = shared.find_moved()
            if moved is not None and self.offload:
                raise RuntimeError(
                    f"ZeroRedundancyOptimizer.step on rank {self.rank}: parameter {moved} of group {number} (shape "
                    f"{tuple(shared.parameters[moved].shape)}) was moved to another device or dtype. Move the model "
                    "before the optimizer is built."
                )
            if moved is not None:
                raise RuntimeError(
                    f"ZeroRedundancyOptimizer.step on rank {self.rank}: parameter {moved} of group {number} (shape "
                    f"{tuple(shared.parameters[moved].shape)}) was moved out of the memory that the ranks share, by "
                    "module.to(...), an assignment to .data, loading with assign=True, or the step of another "
                    "optimizer. Do this before the ZeroRedundancyOptimizer is built."
                )

    # -- the step ------------------------------------------------------------------------------------------------

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters on this rank, as every optimizer does."""
        undecorated(Optimizer.zero_grad)(self, set_to_none)

    @untraced
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's slices, and wait until all ranks have updated theirs. All ranks call this.

        `kwargs` are passed to the inner optimizer; the closure runs once before the step.

        Raises:
            PhalanxError: a rank died, left or timed out; all parameters are from before the step, or all from after it.
            RuntimeError: a parameter was moved to other memory, a gradient that must be cut is sparse, or, with
                gather_gradients=False, a gradient was changed after backward or a GradScaler is used.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if vars(self).pop("found_inf", None) is not None:
            vars(self).pop("grad_scale", None)
            raise RuntimeError(
                "ZeroRedundancyOptimizer with gather_gradients=False: a GradScaler looks for overflows in whole "
                "gradients, but a rank has only its slice. Use gather_gradients=True, or bfloat16 without a scaler"
            )
        self._refuse_moved()
        refuse_touched(self._needed_slices(), self.rank)
        if self._consolidated:
            self.state.clear()
            self._consolidated = False
        self._copy_options_to_local()
        if self._offload is None:
            with self._gradients(), self._undo.step() if self._undo is not None else contextlib.nullcontext():
                self.optim.step(**kwargs)
                self._save_backup()
        else:
            self._step_offloaded(self._offload, kwargs)
        self._copy_options_from_local()
        return loss

    def _step_offloaded(self, offload: Offload, kwargs: dict[str, Any]) -> None:
        offload.prepare()
        if self._undo is None:
            offload.update(self.optim, kwargs)
            return
        try:
            with self._undo.step():
                offload.update(self.optim, kwargs)
                self._save_backup()
        except BaseException:
            if (
                self.has_updated and self._undo.latest_started
            ):  # a rank was lost after all ranks had completed their parts
                offload.push_exact()
            raise
        offload.push()

    def _save_backup(self) -> None:
        if self._backup is not None and self._undo is not None:
            self._backup.save(self._undo.latest_started, self.shard_state_dict()["state"])

    @contextlib.contextmanager
    def _gradients(self) -> Iterator[list[Tensor]]:
        """Yield the tensors that this rank's optimizer updates, with their gradients."""
        shards = [shard for group in self._shards for shard in group]
        try:
            for shard in shards:
                shard.acquire_gradient()
            yield [shard.tensor for shard in shards]
        finally:
            for shard in shards:
                shard.release_gradient()

    @untraced
    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Scale the gradients for the next step so that their norm over all parameters is at most `max_norm`.

        Like `torch.nn.utils.clip_grad_norm_`, but each rank reads and scales only its own slices, so this is also
        correct with `gather_gradients=False`. All ranks call this. Return the norm before clipping, bitwise equal on
        all ranks.

        Shape: the norm is a scalar, ().
        Cost: reads and scales this rank's slices of the gradients; one all_reduce of one number.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.
            ValueError: `norm_type` is not above zero; counting nonzero values is not supported.
        """
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"clip_grad_norm_: norm_type must be above zero, or infinity, got {norm_type}")
        if self._offload is not None:
            norm = self._norm(self._offload.gradient_slices(), norm_type, error_if_nonfinite, foreach)
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as clip_grads_with_norm_ computes it
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            self._offload.scale_gradients(factor, parameters, foreach)
        else:
            with self._gradients() as tensors:
                gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
                norm = self._norm(gradients, norm_type, error_if_nonfinite, foreach)
                clip_grads_with_norm_(tensors, max_norm, norm, foreach=foreach)
                for shard in (shard for group in self._shards for shard in group):
                    if isinstance(shard, ParameterShard):
                        shard.write_gradient()
        for parameter, needed in self._needed_slices():
            if parameter.grad is not None and needed.is_mean(parameter.grad):
                needed.mark(parameter.grad)
        return norm

    def _norm(
        self, gradients: list[Tensor], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> Tensor:
        norm = total_norm(gradients, norm_type, dtype_of_norm(self.param_groups), self.process_group, foreach=foreach)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"ZeroRedundancyOptimizer.clip_grad_norm_: the total norm of order {norm_type} is {norm.item()}. "
                "To clip anyway, remove error_if_nonfinite."
            )
        return norm

    def _needed_slices(self) -> Iterator[tuple[Tensor, NeededSlice]]:
        if not self.gather_gradients:
            for parameter in (parameter for shared in self._shared for parameter in shared.parameters):
                needed = find_needed(parameter, self.process_group)
                if needed is not None:
                    yield parameter, needed

    def _copy_options_to_local(self) -> None:
        """Copy the options, which users and schedulers may have changed, to this rank's optimizer."""
        for mine, local, fuses in zip(self.param_groups, self.optim.param_groups, self._fuses, strict=True):
            local.update(options_of(mine))
            if fuses and may_fuse(self._optimizer_class, mine, mine["params"]):
                local["fused"] = True

    def _copy_options_from_local(self, first: int = 0) -> None:
        """Copy the options of this rank's optimizer, mainly its defaults, to the groups from `first` on."""
        for mine, local, fuses in [*zip(self.param_groups, self.optim.param_groups, self._fuses, strict=False)][first:]:
            chosen = {"fused": mine.get("fused")} if fuses else {}  # do not show our choice as the user's option
            mine.update({**options_of(local), **chosen})

    # -- when ranks are lost -------------------------------------------------------------------------------------

    def back_up_state(self) -> None:
        """Back up each rank's state from now on, in memory that survives the rank. All ranks call this.

        Cost: one more copy of this rank's state in each step, and of all state during a move to another group.
        """
        self._moving = None if self._undo is None else self._moving
        if self._undo is None:
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        elements = sum(p.numel() for p in parameters)
        share = elements if not self._cut else elements // self.world_size + 64 * len(parameters)
        backup = StateBackup(self.process_group, share, len(parameters))
        backup.save(self._undo.number, self.shard_state_dict()["state"])
        dist.barrier(group=self.process_group)
        self._backup, self._moving = backup, None

    @property
    def num_updates(self) -> int:
        """Return the number of updates of the parameters; all ranks agree whether a failed step counts."""
        if self._moving is not None:
            return self._moving[0]
        return 0 if self._undo is None else self._undo.number

    @property
    def has_updated(self) -> bool:
        """Return whether the latest step has changed the parameters, even if it raised."""
        return self._moving is not None or self._undo is None or self._undo.number == self._undo.latest_started

    def can_roll_back(self, num_updates: int) -> bool:
        """Return whether `roll_back(num_updates)` is possible: only the latest update can be undone, with a backup."""
        undo, backup = None if self._moving is not None else self._undo, self._backup
        if self.num_updates == num_updates or undo is None or backup is None:
            return self.num_updates == num_updates
        return undo.number == undo.latest_started == num_updates + 1 and backup.has_all(num_updates)

    @torch.no_grad()
    def roll_back(self, num_updates: int) -> None:
        """Restore the parameters and state as they were after `num_updates` updates; undo at most one update.

        Not collective: this rank's parameters move to its own memory, because other ranks may keep the update.
        """
        if self._undo is not None and self.num_updates > num_updates:
            self._moving = num_updates, self._state_after(num_updates)
            for shared, memory in zip(self._shared, self._undo.before(), strict=True):
                shared.move_to(memory)

    def read_state_backup(self) -> dict[int, Any] | None:
        """Return the state of all ranks, lost ranks included, after the latest update, by parameter number.

        Return None if the state was not backed up.
        """
        return self._moving[1] if self._moving is not None else self._state_after(self.num_updates)

    def _state_after(self, num_updates: int) -> dict[int, Any] | None:
        backup = None if self._backup is None else self._backup.read(num_updates)
        shards = [self.shard_state_dict()["state"]] if self._undo is None else backup  # a single rank has no backup
        parameters = [p for group in self.param_groups for p in group["params"]]
        return None if shards is None else merge_states(shards, parameters)

    def regroup(self, process_group: dist.ProcessGroup, source: int, num_updates: int) -> None:
        """Move to another group, with the parameters of its rank `source` and no state. All its ranks call this.

        `num_updates` is the number of updates of rank `source`.
        """
        if self._moving is None:  # not None if an earlier move was interrupted
            self._moving = self.num_updates, self.read_state_backup()
        self._all_hosts = self.process_group = process_group
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self._undo = Undo(process_group) if self.world_size > 1 else None
        masters = [one if isinstance(one, MasterParameters) else None for one in self._shared]
        masters += [None] * (len(self.param_groups) - len(masters))  # an earlier move was interrupted
        self._offload = self._new_offload()
        self._shared, self._shards, self._local, self._backup, self._fuses = [], [], None, None, []
        for group, previous in zip(self.param_groups, masters, strict=True):
            self._share(group, source, previous)
        if self._undo is not None:
            self._undo.start_from(num_updates)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "ZeroRedundancyOptimizer cannot be pickled or copied: it has a process group and memory shared with other "
            "ranks. Save its state_dict() after consolidate_state_dict()"
        )


def divide_by_host(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of `group` on this host if each host updates all parameters independently, otherwise ().

    Hosts update independently if the group has several hosts with equally many ranks, at least two on each.
    """
    hosts = ranks_by_host(group)
    sizes = {len(ranks) for ranks in hosts}
    if len(sizes) != 1 or min(sizes) < 2:
        return ()
    return next(ranks for ranks in hosts if group.rank() in ranks)


def make_host_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a group of `ranks`, the ranks of `group` on this host. These ranks call this together."""
    numbers = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(
        [numbers[rank] for rank in ranks], backend="phalanx", use_local_synchronization=True
    )
    return made


def broadcast_parameters(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `parameters` with the parameters of rank 0 of `group`. All its ranks call this."""
    for parameter in parameters:
        dist.broadcast(parameter.detach(), group=group, group_src=0)


def build_local(
    optimizer_class: type[Optimizer], group: dict[str, Any], defaults: dict[str, Any], *, cuts: bool
) -> Optimizer:
    """Return this rank's optimizer. If `cuts`, the class is torch's: skip its decorators, which import Dynamo."""
    if not cuts:
        return optimizer_class([group], **defaults)
    local = optimizer_class.__new__(optimizer_class)
    vars(local)["add_param_group"] = types.MethodType(undecorated(Optimizer.add_param_group), local)
    local.__init__([group], **defaults)  # type: ignore[misc]
    step = undecorated(optimizer_class.step)
    if not hasattr(step, "__wrapped__"):  # otherwise other code has wrapped it
        vars(local)["step"] = types.MethodType(Optimizer.profile_hook_step(step), local)
    return local


def request_gradients(parameters: Sequence[Tensor], mine: Mapping[int, Slice] | None, group: dist.ProcessGroup) -> None:
    """Request slices of the parameters' gradients for this rank from now on; whole gradients if `mine` is None."""
    for index, parameter in enumerate(parameters):
        if mine is None:
            need_all(parameter)  # an earlier optimizer may have requested a slice
        else:
            part = mine.get(index, Slice(index, 0, 0))
            need_slice(parameter, part.start, part.stop, group)


def refuse_touched(slices: Iterable[tuple[Tensor, NeededSlice]], rank: int) -> None:
    """Refuse gradients that other code has changed: outside of this rank's slices, that code used values of one rank.

    Raises:
        RuntimeError: a gradient was changed.
    """
    for parameter, needed in slices:
        if parameter.grad is not None and needed.is_touched(parameter.grad):
            raise RuntimeError(
                f"ZeroRedundancyOptimizer.step on rank {rank}: the gradient of a parameter of shape "
                f"{tuple(parameter.shape)} was changed after backward, but with gather_gradients=False this rank "
                "has only the mean of a slice. Clip with optimizer.clip_grad_norm_(max_norm) instead of "
                "torch.nn.utils.clip_grad_norm_, or remove gather_gradients=False."
            )


def total_norm(
    gradients: Sequence[Tensor], norm_type: float, dtype: torch.dtype, group: dist.ProcessGroup, *, foreach: bool | None
) -> Tensor:
    """Return the norm over all ranks' `gradients`, bitwise identical on all ranks. All ranks call this.

    Shape: ().
    Cost: one all_reduce of one number.
    """
    norm = get_total_norm(gradients, norm_type, foreach=foreach)
    norm = norm.to("cpu", dtype)  # so that a rank without gradients has the same dtype
    if norm_type == math.inf:
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    norm = norm.pow(norm_type)
    dist.all_reduce(norm, group=group)
    return norm.pow(1 / norm_type)


def dtype_of_norm(groups: Sequence[Mapping[str, Any]]) -> torch.dtype:
    """Return the dtype of the norm over an optimizer's groups: float64 if any parameter is float64 or complex128."""
    wide = {torch.float64, torch.complex128}
    return torch.float64 if any(p.dtype in wide for group in groups for p in group["params"]) else torch.float32
