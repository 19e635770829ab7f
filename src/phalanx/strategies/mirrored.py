"""A mirrored strategy keeps a complete copy of the model on every rank, and averages gradients in each step."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from phalanx._base.param_groups import MakeOptimizer
from phalanx._comm.backend import Job
from phalanx.ddp import DistributedDataParallel
from phalanx.strategies.devices import decide_devices, device_of
from phalanx.strategies.recipe import require_parameters_of
from phalanx.strategies.start import join_or_start, local_world_size, require_as_many
from phalanx.strategies.strategy import Strategy, may_have_others, world


class ReplicatedStrategy(Strategy):
    """`ReplicatedStrategy` has one replica on each rank of the job, however the job was started."""

    def __init__(self, devices: int | Sequence[str] | None, *, launch: bool, timeout: float) -> None:
        wanted = decide_devices(self._called, devices)
        job = join_or_start(self._called, len(wanted), launch=launch, timeout=timeout)
        self._check_place(job, None if devices is None else len(wanted))
        super().__init__(job, num_replicas=job.world_size, replica=job.rank)
        self.device = device_of(wanted, job.local_rank)

    # Not cached: an elastic job forms a new group when its ranks change.

    @property
    def num_replicas_in_sync(self) -> int:
        group = world()
        return 1 if group is None else group.size()

    @property
    def replica_id_in_sync_group(self) -> int:
        group = world()
        return 0 if group is None else group.rank()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return world()

    def _check_place(self, job: Job, wanted: int | None) -> None:
        if wanted is not None:
            require_as_many(self._called, wanted, job)


class MirroredStrategy(ReplicatedStrategy):
    """Use all devices of one host with `phalanx.DistributedDataParallel`: one rank per GPU, or per core without GPUs.

    Started as `python train.py`, with more than one device, the script restarts itself under `phalanx run`: the code
    above this call runs twice. Under `phalanx run`, torchrun, mpiexec or srun the strategy uses the existing ranks.

    Arguments:
        devices: their number, or names such as "cuda:0" or "cpu:1"; by default all.
        launch: False never restarts the script; a process without a launcher is one replica.
        timeout: the time limit of each operation between ranks, in seconds.
        options: passed to DistributedDataParallel.

    Raises:
        ValueError: the job has several hosts, or its ranks do not match `devices`.
        TypeError: neither the strategy nor DistributedDataParallel has such an option.
        RuntimeError: the program cannot be restarted, for example a notebook.
    """

    name = "mirrored"

    def __init__(
        self,
        devices: int | Sequence[str] | None = None,
        *,
        launch: bool = True,
        timeout: float = 1800.0,
        **options: Any,
    ) -> None:
        _check_options(self._called, options)
        self._options = options
        super().__init__(devices, launch=launch, timeout=timeout)

    def _check_place(self, job: Job, wanted: int | None) -> None:
        if (local := local_world_size(job)) < job.world_size:
            raise ValueError(
                f"{self._called} is for one host, but this job has {job.world_size} ranks, {local} of them here: use "
                "MultiWorkerMirroredStrategy"
            )
        super()._check_place(job, wanted)

    def _set_up(self, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        if not may_have_others():
            return super()._set_up(model, optimizer)
        wrapped = DistributedDataParallel(model, **self._options)
        _, made = super()._set_up(model, optimizer)
        require_parameters_of(self._called, model, made)
        return wrapped, made

    @property
    def _broadcasts_buffers(self) -> bool:  # True if the next step would broadcast buffers anyway
        return bool(self._options.get("broadcast_buffers", True))

    @property
    def bare_model(self) -> nn.Module:
        """Return the model inside DistributedDataParallel."""
        model = super().bare_model
        return model.module if isinstance(model, DistributedDataParallel) else model


def _check_options(called: str, options: Mapping[str, Any]) -> None:
    known = list(inspect.signature(DistributedDataParallel).parameters)[1:]  # without the module
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, ["devices", "launch", "timeout", *known], n=1)
            raise TypeError(
                f"{called} has no option {name!r}{f'; you may mean {close[0]!r}' if close else ''}: it has 'devices', "
                "'launch', 'timeout', and those of DistributedDataParallel"
            )


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """Use all devices of several hosts; otherwise like MirroredStrategy.

    The launcher determines the hosts: `phalanx run --nnodes 2`, torchrun, srun, mpiexec.

    Raises:
        ValueError: the ranks of a host do not match `devices`.
    """

    name = "multi_worker_mirrored"

    def _check_place(self, job: Job, wanted: int | None) -> None:
        ReplicatedStrategy._check_place(self, job, wanted)
