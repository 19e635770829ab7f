"""Trainers call these functions on a server through `phalanx.rpc`; each passes its request to a `HostedShard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.futures import Future

from phalanx.parameter_server.clipping import Norms
from phalanx.parameter_server.groups import Options
from phalanx.parameter_server.hosted_shard import host
from phalanx.parameter_server.layout import State
from phalanx.parameter_server.shard import PushedGradients, Spec
from phalanx.rpc.functions import async_execution


@async_execution
def create(name: str, index: int, spec: Spec, state: State) -> Future[Any]:
    """Create the shard with the first trainer's values."""
    place = host(name, index)
    return place.request(partial(place.create, spec, state))


def cancel_creation(name: str, index: int) -> list[str]:
    """Stop waiting for the trainers that use the previous shard of this name, and return their names."""
    return host(name, index).cancel_creation()


@async_execution
def attach(name: str, index: int, trainer: str, worker: int, described: str) -> Future[Any]:
    """Attach a trainer, the worker with this uid, once the first trainer has sent its values."""
    place = host(name, index)
    return place.request(partial(place.attach, trainer, worker, described))


@async_execution
def push(name: str, index: int, trainer: str, clock: int, gradients: PushedGradients) -> Future[Any]:
    """Apply a trainer's gradients for this shard."""
    place = host(name, index)
    return place.request(partial(place.push, trainer, clock, gradients))


@async_execution
def leave(name: str, index: int, trainer: str) -> Future[Any]:
    """Remove a trainer that has finished."""
    place = host(name, index)
    return place.request(partial(place.write, ("leave", trainer)))


@async_execution
def load(name: str, index: int, trainer: str, number: int, state: State | None) -> Future[Any]:
    """Load the first trainer's state; `state` is None in the requests of the other trainers."""
    place = host(name, index)
    place.request_load(trainer, number)
    return place.request(partial(place.load, trainer, number, state))


@async_execution
def pull(name: str, index: int, trainer: str, clock: int, dense: list[str], rows: Mapping[str, Tensor]) -> Future[Any]:
    """Return the shard's values for a trainer's next step."""
    place = host(name, index)
    return place.request(partial(place.pull, trainer, clock, dense, rows))


@async_execution
def norms(name: str, index: int, trainer: str, clock: int) -> Future[dict[str, Norms]]:
    """Return the norms of the shard's gradients for a step."""
    place = host(name, index)
    return place.request(partial(place.norms, trainer, clock))


@async_execution
def clip(name: str, index: int, clock: int, total: Tensor) -> Future[Any]:
    """Apply a step whose gradients have the norm `total` over all servers."""
    place = host(name, index)
    return place.request(partial(place.write, ("clip", clock, total)))


@async_execution
def add(name: str, index: int, *arguments: Any) -> Future[Any]:
    """Add a parameter group."""
    place = host(name, index)
    return place.request(partial(place.add, *arguments))


@async_execution
def state(
    name: str, index: int, trainer: str, clock: int, options: Mapping[str, Sequence[Options]] | None = None
) -> Future[Any]:
    """Return the complete state of the shard."""
    place = host(name, index)
    return place.request(partial(place.state, trainer, clock, options))


def clocks(name: str, index: int) -> dict[str, int]:
    """Return how many steps each trainer has pushed."""
    return host(name, index).clocks()
