"""`ShardedState` saves and loads the state of a sharded optimizer: a rank's own part, or the whole state."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from phalanx._comm.backend.dynamo import undecorated, untraced
from phalanx.optim.master_parameters import MasterParameters
from phalanx.optim.offload import Offload
from phalanx.optim.offloaded_shard import OffloadedShard
from phalanx.optim.parameter_shard import ParameterShard
from phalanx.optim.shared_parameters import SharedParameters
from phalanx.optim.state import StateDict, cut_state, layout_of, merge_state_dicts, refuse_state_without_parameter

_MASTER = "master"  # the key of a parameter's master in its state


class ShardedState(Optimizer):
    """`ShardedState` saves and loads this rank's shards of an optimizer's state.

    Its subclass `ZeroRedundancyOptimizer` sets the declared attributes.
    """

    process_group: dist.ProcessGroup
    _all_hosts: dist.ProcessGroup  # the user's group, of which `process_group` has the ranks of this host
    rank: int
    world_size: int
    _optimizer_class: type[Optimizer]
    _offload: Offload | None
    _shared: list[SharedParameters | MasterParameters]
    _shards: list[list[ParameterShard] | list[OffloadedShard]]
    _local: Optimizer | None
    _moving: tuple[int, dict[int, Any] | None] | None
    _consolidated: bool

    @property
    def is_on_hosts(self) -> bool:
        """Return whether the user's group is on several hosts; each host then updates all parameters."""
        return self._all_hosts is not self.process_group

    @property
    def optim(self) -> Optimizer:
        assert self._local is not None  # construction adds at least one group
        return self._local

    def _copy_options_to_local(self) -> None:
        raise NotImplementedError

    def shard_state_dict(self) -> StateDict:
        """Return this rank's part of the state, for this rank to save; `merge_state_dicts` merges all parts.

        Not collective. The tensors are the optimizer's own: save or copy them before the next step. State that belongs
        to no parameter raises ValueError.
        """
        numbers = {p: number for number, p in enumerate(p for g in self.param_groups for p in g["params"])}
        state = {}
        for shard in (shard for group in self._shards for shard in group):
            if shard.tensor in self.optim.state:
                state[numbers[shard.parameter]] = {
                    "start": shard.part.start,
                    "stop": shard.part.stop,
                    "state": {**self.optim.state[shard.tensor], **_master_of(shard)},
                }
        refuse_state_without_parameter(self.optim.state, self._optimizer_class, known=len(state))
        return {
            "param_groups": [
                {
                    **{key: value for key, value in g.items() if key != "params"},
                    "params": [numbers[p] for p in g["params"]],
                }
                for g in self.param_groups
            ],
            "state": state,
            "layout": layout_of(numbers),
        }

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on rank `to` of the optimizer's group; `state_dict` returns it until the next step.

        All ranks call it.
        Cost: rank `to` holds the state of all ranks.

        Raises:
            ValueError: `to` is not a rank of the group.
        """
        if not 0 <= to < self._all_hosts.size():
            raise ValueError(
                f"consolidate_state_dict: to={to} is not a rank of the group, which has {self._all_hosts.size()} ranks"
            )
        number = dist.get_global_rank(self._all_hosts, to)
        on_host = dist.get_process_group_ranks(self.process_group)
        if number not in on_host:  # the host of rank `to` has all parts itself
            return
        shards: list[Any] | None = [None] * self.world_size if self._all_hosts.rank() == to else None
        dist.gather_object(self.shard_state_dict(), shards, group=self.process_group, group_dst=on_host.index(number))
        if shards is not None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            merged = merge_state_dicts(shards)["state"]
            self.state = defaultdict(dict, {parameters[number]: state for number, state in merged.items()})
            self._consolidated = True

    @untraced
    def state_dict(self) -> StateDict:
        """Return the whole state, in the plain optimizer's `state_dict` form; any number of ranks can load it.

        Raises:
            RuntimeError: the current state was not consolidated on this rank.
        """
        if not self._consolidated:
            rank = self._all_hosts.rank()
            raise RuntimeError(
                f"ZeroRedundancyOptimizer.state_dict on rank {rank}: each rank has only the state of its slices. "
                f"First call consolidate_state_dict(to={rank}) on all ranks after the last step, or "
                "save shard_state_dict() on every rank."
            )
        whole: StateDict = undecorated(Optimizer.state_dict)(self)
        return whole

    @untraced
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load this rank's part of a whole state: of the plain optimizer, or consolidated on any number of ranks.

        Not collective, but all ranks must load the same state. Merge shards with `merge_state_dicts` first.

        Raises:
            ValueError: the state belongs to other groups or parameters.
        """
        with self._as_masters() as parameter_of:  # the state gets the masters' dtype and device
            # Checks, converts dtypes and calls the user's hooks; at this point the state is whole.
            undecorated(Optimizer.load_state_dict)(self, state_dict)
        self._consolidated = False
        whole, self.state = self.state, defaultdict(dict)
        self._take_state({parameter_of.get(like, like): state for like, state in whole.items()})

    @contextlib.contextmanager
    def _as_masters(self) -> Iterator[dict[Any, Tensor]]:
        """With offload, replace the groups' parameters by their masters; yield the parameter of each master."""
        parameter_of: dict[Any, Tensor] = {}
        given = [group["params"] for group in self.param_groups]
        try:
            if self._offload is not None:
                for group, shared in zip(self.param_groups, self._shared, strict=True):
                    group["params"] = [shared.shaped(number) for number in range(len(group["params"]))]
                    parameter_of.update(zip(group["params"], shared.parameters, strict=True))
            yield parameter_of
        finally:
            for group, parameters in zip(self.param_groups, given, strict=True):
                group["params"] = parameters

    def _take_state(self, whole: Mapping[Tensor, Any]) -> None:
        """Load this rank's part of the whole state, by parameter, with the current options."""
        self.optim.state.clear()
        for shard in (shard for group in self._shards for shard in group):
            if state := whole.get(shard.parameter):
                self._set_state(shard, cut_state(state, shard.parameter, shard.part.start, shard.part.stop))
        self._copy_options_to_local()
        if self._offload is not None:
            self._offload.share_state(self.optim, recheck=True)

    def _set_state(self, shard: ParameterShard | OffloadedShard, state: dict[str, Any]) -> None:
        if isinstance(shard, OffloadedShard):
            shard.load_master(state.pop(_MASTER, None))
        if state:
            self.optim.state[shard.tensor] = state

    def load_state_backup(self, whole: dict[int, Any]) -> None:
        """Load this rank's part of a whole state that `read_state_backup` returned."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._take_state({parameters[number]: state for number, state in whole.items()})


def _master_of(shard: ParameterShard | OffloadedShard) -> dict[str, Tensor]:
    """Return the master to save with the state of a parameter that has a more precise master."""
    if isinstance(shard, OffloadedShard) and shard.tensor.dtype != shard.parameter.dtype:
        return {_MASTER: shard.tensor.detach()}
    return {}
