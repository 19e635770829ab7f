"""`PipelineStrategy` places the model's stages on the ranks, and micro-batches flow through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

import phalanx._comm.backend as backend
from phalanx._base.param_groups import MakeOptimizer
from phalanx.pipeline import Pipeline
from phalanx.strategies.devices import decide_devices, device_of
from phalanx.strategies.loss import require_pair
from phalanx.strategies.recipe import Recipe
from phalanx.strategies.start import join_or_start, require_as_many
from phalanx.strategies.strategy import Strategy


class PipelineStrategy(Strategy):
    """Run `phalanx.Pipeline` over the ranks, or `data` parallel pipelines with averaged gradients.

    A `loss_fn` is required; `step` returns the loss of this pipeline's mini-batch, on each of the pipeline's ranks.

    Arguments:
        data: the number of pipelines, each over its part of the ranks.
        devices, launch, timeout: as in MirroredStrategy; on one or several hosts. A rank's stages are on the rank's
            device.
        options: passed to Pipeline: micro_batches, schedule, balance, checkpoint, example, ...

    Raises:
        ValueError: the ranks do not divide evenly into the pipelines, or do not match `devices`.
    """

    name = "pipeline"

    def __init__(
        self,
        *,
        data: int = 1,
        devices: int | Sequence[str] | None = None,
        launch: bool = True,
        timeout: float = 1800.0,
        **options: Any,
    ) -> None:
        wanted = decide_devices(self._called, devices)
        job = join_or_start(self._called, len(wanted), launch=launch, timeout=timeout)
        if devices is not None:
            require_as_many(self._called, len(wanted), job)
        if not (isinstance(data, int) and data >= 1 and job.world_size % data == 0):
            raise ValueError(f"PipelineStrategy: {job.world_size} ranks do not divide into data={data!r} pipelines")
        if not dist.is_initialized():
            backend.init()
        self._mesh: DeviceMesh | None = None
        group = None
        stages = job.world_size // data
        if data > 1:
            self._mesh = backend.mesh(pipeline=stages, data=data)
            group = self._mesh.get_group("data")
        super().__init__(job, num_replicas=data, replica=job.rank % data, process_group=group)
        self.device = device_of(wanted, job.local_rank)
        self._pipeline_options = {"device": self.device, **options}

    is_elastic = False  # no other rank has a lost rank's stage
    _moves_model = False
    _skips_together = False
    ranks_differ = True

    def _set_up(self, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        if self._loss_of is not None and self._loss_fn is None:
            raise ValueError(
                "PipelineStrategy.setup: loss_of calls the whole model, but each rank has only a part of it: give a "
                "loss_fn of the model's result and the target"
            )
        recipe = Recipe.of(self._called, model, optimizer)
        pipe = Pipeline(model, loss_fn=self._loss_fn, mesh=self._mesh, **self._pipeline_options)
        return pipe, recipe.make(dict(pipe.named_parameters()))

    def compute_gradients(
        self, batch: Any, *, share: float = 1.0, weight: float | None = None, is_last: bool = True
    ) -> Tensor:
        """Compute the gradients of a whole mini-batch, with `share` and weight 1 only; return the mini-batch's loss."""
        if share * self._weigh(weight) != 1.0 or not is_last:
            raise ValueError(
                "PipelineStrategy: a step cannot accumulate gradients over several batches, and all replicas must have "
                "equally many samples. Use a larger batch with more micro_batches; for the shorter last batch of an "
                "IterableDataset, set drop_last=True"
            )
        pipe = self._pipe()
        *inputs, target = require_pair(batch)
        with self.autocasting():
            return pipe.step(*inputs, target=target).detach()

    def _clip(self, max_norm: float) -> Tensor:
        return self._pipe().clip_grad_norm_(max_norm)

    def evaluate(self, *inputs: Any) -> Any:
        """Return the model's result on the rank of the last stage, else None. All ranks of a pipeline call it."""
        with torch.no_grad(), self.autocasting():
            return self._pipe()(*inputs)

    def _pipe(self) -> Pipeline:
        self._require_set_up()
        assert isinstance(self._model, Pipeline)
        return self._model
