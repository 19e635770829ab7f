"""`ParameterServerStrategy` keeps parameters on the last ranks, the servers; the other ranks compute gradients."""

from __future__ import annotations

import atexit
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx import rpc
from phalanx._base.param_groups import MakeOptimizer, options_of
from phalanx.errors import summary_of
from phalanx.parameter_server import ParameterServer
from phalanx.strategies.devices import decide_devices
from phalanx.strategies.recipe import Recipe
from phalanx.strategies.start import join_or_start
from phalanx.strategies.strategy import Strategy


class ParameterServerStrategy(Strategy):
    """Train with `phalanx.ParameterServer`: the last ranks serve, and the others pull parameters and push gradients.

    Servers stay in this constructor until all trainers have ended, and then exit; meanwhile they ignore SIGTERM. Only
    the trainers, which are the replicas, run the rest of the script. Each trainer has its own buffers (BatchNorm's
    statistics).

    Arguments:
        num_servers: ranks that serve.
        num_trainers: ranks that train, if the script restarts itself; by default one for each core.
        synchronous: average a step's gradients over the trainers. False applies each push when it arrives, as
            tf.distribute does.
        max_staleness: the maximum lead of a trainer in asynchronous training, in steps; None means no maximum.
        launch, timeout: as in MirroredStrategy.

    Raises:
        ValueError: `num_servers` is below 1, or leaves no rank to train.
    """

    name = "parameter_server"

    is_elastic = False  # which rank calls which server is fixed when the job starts

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
        self.is_in_step = synchronous
        self._server: ParameterServer | None = None
        self._served: ServedOptimizer | None = None
        group = dist.new_group(list(range(trainers)))
        rpc.init_rpc([*self._trainers, *self._servers][job.rank], rank=job.rank, world_size=job.world_size)
        if job.rank >= trainers:
            _ignore_sigterm()
            rpc.shutdown()  # serves the trainers' calls until the trainers have ended
            sys.exit(0)
        atexit.register(self._close_at_exit)
        self._trainers_group: dist.ProcessGroup | None = group
        several = group if trainers > 1 else None
        super().__init__(job, num_replicas=trainers, replica=job.rank, process_group=several)

    _skips_together = False

    @property
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """Return the group of trainers, even of a single trainer: the job's group also has the servers."""
        return self._trainers_group

    @property
    def training_group(self) -> dist.ProcessGroup | None:
        """Return the group of trainers, without the servers; None for a single trainer."""
        return self._process_group

    def _set_up(self, model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        recipe = Recipe.of(self._called, model, optimizer)
        _require_picklable(recipe)
        if self._server is not None:
            raise ValueError("ParameterServerStrategy.setup: only one model; use phalanx.ParameterServer for several")
        parameters = dict(model.named_parameters())
        held = {name for names, _ in recipe.groups for name in names}
        if frozen := [name for name in parameters if name not in held and parameters[name].requires_grad]:
            raise ValueError(
                f"ParameterServerStrategy.setup: the optimizer does not have parameter {frozen[0]!r}, which requires a "
                "gradient: freeze it until you add it in a group"
            )
        self._server = ParameterServer(
            self._servers,
            self._trainers,
            dense=[
                {**options, "params": {name: parameters[name] for name in names}} for names, options in recipe.groups
            ],
            optimizer=recipe.call,
            synchronous=self._is_synchronous,
            max_staleness=self._max_staleness,
        )
        self._served = ServedOptimizer(parameters, self._server)
        recipe.attach_hooks(self._served)
        return model, self._served

    def update(self, max_norm: float | None = None) -> Tensor | None:
        """Update as every strategy does. The servers clip the mean of the trainers' gradients."""
        assert self._served is not None
        self._served.step(max_norm=max_norm)
        self._served.zero_grad()
        return self._served.total_norm

    def _close_at_exit(self) -> None:
        """Close at process exit. After an error, do not wait for the other trainers, so that they detect the loss."""
        if getattr(sys, "last_type", None) is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        if self._num_setups >= 0:
            atexit.unregister(self._close_at_exit)
            self._num_setups, self._server = -1, None
            rpc.shutdown(graceful=False)

    def close(self) -> None:
        """Close this trainer; when all trainers have closed, the servers exit.

        Called at the end of the process, unless it was called before.
        """
        if self._server is None and self._num_setups < 0:
            return
        atexit.unregister(self._close_at_exit)
        self._num_setups = -1
        if self._server is not None:
            self._server.close()
            self._server = None
        rpc.shutdown()


class ServedOptimizer(Optimizer):
    """A `ServedOptimizer` is a trainer's view of the servers' optimizer: `step` pushes gradients and pulls parameters.

    `total_norm` is the norm of the last step's gradients before clipping.

    Arguments:
        parameters: all parameters of the model, by name; the servers have some of them, by the same names.
    """

    def __init__(self, parameters: Mapping[str, Tensor], server: ParameterServer) -> None:
        self._parameters, self._server = dict(parameters), server
        self._is_made = False
        self.total_norm: Tensor | None = None
        theirs = server.optimizer
        groups = [
            {**options, "params": [self._parameters[name] for name in names]}
            for names, options in zip(theirs.names, theirs.options(), strict=True)
        ]
        super().__init__(groups, theirs.defaults)
        self._is_made = True
        self._pull()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group on the servers, with the first trainer's values. All trainers call it.

        Raises:
            ValueError: a tensor is not a parameter of the model.
            MismatchError: another trainer has added a different group.
            PeerLostError: the first trainer is lost, or all servers of a shard are lost.
        """
        super().add_param_group(param_group)
        if not self._is_made:
            return
        group = self.param_groups[-1]
        name_of = {id(parameter): name for name, parameter in self._parameters.items()}
        try:
            if unknown := [one for one in group["params"] if id(one) not in name_of]:
                raise ValueError(
                    f"ParameterServerStrategy: a tensor of shape {tuple(unknown[0].shape)} is not a parameter of the "
                    "model"
                )
            named = {name_of[id(one)]: one for one in group["params"]}
            self._server.optimizer.add_param_group({**options_of(group), "params": named})
        except BaseException:
            self.param_groups.pop()
            raise
        self._pull()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None) -> Any:
        """Take one step of this trainer with its groups' options; return the closure's loss.

        Arguments:
            max_norm: clip the gradients that the servers apply (the mean of all trainers) to this 2-norm.

        Raises:
            ValueError: a gradient is sparse.
            MismatchError: the trainers of a synchronous step have set different options, or clip differently.
            PeerLostError: all servers of a shard are lost.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {name: one.grad for name, one in self._served_parameters().items() if one.grad is not None}
        if rows := [name for name, grad in gradients.items() if grad.is_sparse]:
            raise ValueError(
                f"ParameterServerStrategy: {rows[0]!r} has a sparse gradient: pass that matrix to "
                "phalanx.ParameterServer as a table, whose rows a step pulls and pushes"
            )
        self._send_options()
        self.total_norm = self._server.push_gradients(gradients, max_norm=max_norm)
        self._pull()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the servers' complete parameters and optimizer state. All trainers call it."""
        self._send_options()
        # With the keys of an optimizer's state, which a checkpoint checks.
        return {"state": {}, "param_groups": super().state_dict()["param_groups"], "servers": self._server.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict` on servers and trainers. All trainers call it; the first trainer's state is used."""
        self._server.load_state_dict(state_dict["servers"])
        for group, options in zip(self.param_groups, self._server.optimizer.options(), strict=True):
            group.update(options)
        self._pull()

    def _served_parameters(self) -> dict[str, Tensor]:
        """Return the parameters on the servers, by name."""
        return {name: self._parameters[name] for names in self._server.optimizer.names for name in names}

    def _send_options(self) -> None:
        """Send this trainer's options to the servers."""
        self._server.optimizer.set_options([options_of(group) for group in self.param_groups])

    @torch.no_grad()
    def _pull(self) -> None:
        for name, value in self._server.pull().items():
            self._parameters[name].copy_(value)


def _ignore_sigterm() -> None:
    """Ignore SIGTERM, so that trainers that also receive it can save the servers' state. A script's handler is kept."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _require_picklable(recipe: Recipe) -> None:
    try:
        pickle.dumps(recipe.call)
    except Exception as error:  # any error of a user's class
        raise ValueError(
            f"ParameterServerStrategy.setup: the servers make the optimizer, and its constructor cannot be sent "
            f"({summary_of(error)}): take a class or a function of a module, or functools.partial of one, not a lambda"
        ) from error
