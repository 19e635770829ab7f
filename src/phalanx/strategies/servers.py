"""Parameters on servers: the last ranks keep and update them, the others compute gradients."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx import rpc
from phalanx.parameter_server import ParameterServer
from phalanx.strategies.devices import decide_devices
from phalanx.strategies.recipe import Recipe
from phalanx.strategies.start import find_cluster, join_or_start
from phalanx.strategies.strategy import MakeOptimizer, Strategy


class ParameterServerStrategy(Strategy):
    """`phalanx.ParameterServer`: ranks at the end serve; on the others each step pulls parameters and pushes gradients.

    Serving ranks stay in this constructor until all trainers have ended, and then end as well: what follows in the
    script is the trainers'. They are the replicas. Buffers (statistics of BatchNorm) are each trainer's own.

    Arguments:
        num_servers: ranks that serve.
        num_trainers: ranks that train, where the script starts itself; default one for each core.
        synchronous: a step's gradients are averaged over the trainers. False, as in tf.distribute: each push is
            applied when it comes.
        max_staleness: of asynchronous training, in steps; None is no bound.
        launch, timeout: as of MirroredStrategy.

    Raises:
        ValueError: there are no more ranks than servers.
    """

    name = "parameter_server"

    is_elastic = False  # who calls whom is fixed when the job starts

    def __init__(
        self,
        num_servers: int = 1,
        *,
        num_trainers: int | None = None,
        synchronous: bool = True,
        max_staleness: int | None = None,
        launch: bool = True,
        timeout: float = 1800.0,
    ) -> None:
        if not (isinstance(num_servers, int) and num_servers >= 1):
            raise ValueError(f"ParameterServerStrategy: num_servers must be 1 or more, got {num_servers!r}")
        if find_cluster(self._called) is not None:
            raise ValueError(
                "ParameterServerStrategy: TF_CONFIG is set, and servers and workers are not started by it here: start "
                "the script with `phalanx run`, whose last ranks serve"
            )
        if num_trainers is None:
            num_trainers = len(decide_devices(self._called, None))
        job = join_or_start(self._called, num_trainers + num_servers, launch=launch, timeout=timeout)
        trainers = job.world_size - num_servers
        if trainers < 1:
            raise ValueError(
                f"ParameterServerStrategy: {num_servers} of {job.world_size} ranks would serve, and none would train: "
                f"start {num_servers + 1} or more"
            )
        self._trainers = [f"trainer{rank}" for rank in range(trainers)]
        self._servers = [f"server{index}" for index in range(num_servers)]
        self._is_synchronous, self._max_staleness = synchronous, max_staleness
        self._server: ParameterServer | None = None
        group = dist.new_group(list(range(trainers)))
        rpc.init_rpc([*self._trainers, *self._servers][job.rank], rank=job.rank, world_size=job.world_size)
        if job.rank >= trainers:
            rpc.shutdown()  # waits for the trainers to end; the calls come meanwhile
            sys.exit(0)
        atexit.register(self._close_at_exit)
        self._trainers_group: dist.ProcessGroup | None = group
        several = group if trainers > 1 else None
        super().__init__(job, num_replicas=trainers, replica=job.rank, process_group=several)

    _skips_together = False

    @property
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """The trainers, also if there is one: the servers are in the job's group, and take no part."""
        return self._trainers_group

    @property
    def training_group(self) -> dist.ProcessGroup | None:
        """The trainers; servers take no part."""
        return self._process_group

    def _set_up(self, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        recipe = Recipe.of(self._called, model, optimizer)
        if self._server is not None:
            raise ValueError("ParameterServerStrategy.setup: one model; use phalanx.ParameterServer for several")
        names, options = _one_group(recipe)
        parameters = dict(model.named_parameters())
        if frozen := [name for name in parameters if name not in names and parameters[name].requires_grad]:
            raise ValueError(f"ParameterServerStrategy.setup: the optimizer does not hold parameter {frozen[0]!r}")
        held = {name: parameters[name] for name in names}
        self._server = ParameterServer(
            self._servers,
            self._trainers,
            dense=held,
            optimizer=functools.partial(recipe.kind, **options),
            synchronous=self._is_synchronous,
            max_staleness=self._max_staleness,
        )
        return model, ServedOptimizer(held, self._server, options)

    def _clip(self, max_norm: float) -> Tensor:
        if self._is_synchronous and self.num_replicas_in_sync > 1:
            raise ValueError(
                "ParameterServerStrategy: gradients are averaged on the servers, and clipping those of each trainer "
                "before is something else: leave max_norm out"
            )
        return super()._clip(max_norm)

    def _close_at_exit(self) -> None:
        """Without waiting for the others where this process ends with an error, of which they must hear."""
        if getattr(sys, "last_type", None) is None:
            self.close()
        else:
            rpc.shutdown(graceful=False)

    def close(self) -> None:
        """The trainer has ended; when all have, the servers end. Called when the process ends, if not before."""
        if self._server is None and self._num_setups < 0:
            return
        atexit.unregister(self._close_at_exit)
        self._num_setups = -1
        if self._server is not None:
            self._server.close()
            self._server = None
        rpc.shutdown()


class ServedOptimizer(Optimizer):
    """The servers' optimizer as a trainer sees it: `step` pushes the gradients and pulls the new parameters."""

    def __init__(self, held: Mapping[str, Tensor], server: ParameterServer, options: dict[str, Any]) -> None:
        super().__init__(list(held.values()), dict(options))
        self._held, self._server = dict(held), server
        self._options = [self._shown()]
        self._pull()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of this trainer.

        Raises:
            ValueError: an option was changed here (by a scheduler), of which the servers would not hear; or a gradient
                is sparse.
            PeerLostError: all servers that had some of the parameters are lost.
        """
        if closure is not None:
            raise ValueError("ParameterServerStrategy: optimizers that call a closure need the parameters beside them")
        if self._shown() != self._options[0]:
            raise ValueError(
                "ParameterServerStrategy: the optimizer's options were changed, by a scheduler perhaps; the servers' "
                "optimizer keeps those that it was made with"
            )
        gradients = {name: one.grad for name, one in self._held.items() if one.grad is not None}
        if rows := [name for name, grad in gradients.items() if grad.is_sparse]:
            raise ValueError(
                f"ParameterServerStrategy: {rows[0]!r} has a sparse gradient: give phalanx.ParameterServer the matrix "
                "as a table, of which a step pulls and pushes rows"
            )
        self._server.push_gradients(gradients)
        self._pull()

    def state_dict(self) -> dict[str, Any]:
        """The servers' parameters and optimizer state, whole. Called by all trainers."""
        # In the form of an optimizer's, which is what a checkpoint compares.
        return {"state": {}, "param_groups": super().state_dict()["param_groups"], "servers": self._server.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from it, on servers and trainers. Called by all trainers; that of the first counts."""
        self._server.load_state_dict(state_dict["servers"])
        self._pull()

    @torch.no_grad()
    def _pull(self) -> None:
        for name, value in self._server.pull().items():
            self._held[name].copy_(value)

    def _shown(self) -> dict[str, Any]:
        return {key: value for key, value in self.param_groups[0].items() if key != "params"}


def _one_group(recipe: Recipe) -> tuple[tuple[str, ...], dict[str, Any]]:
    if len(recipe.groups) > 1:
        raise ValueError(
            "ParameterServerStrategy.setup: the servers have one optimizer for all parameters, and this one has "
            f"{len(recipe.groups)} groups: use phalanx.ParameterServer, several of them"
        )
    names, options = recipe.groups[0]
    return names, {key: options.get(key, value) for key, value in recipe.defaults.items()}
