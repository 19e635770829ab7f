"""Trainers call these functions on a server by `phalanx.rpc`; each finds the shard that it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.futures import Future

from phalanx.parameter_server.clipping import Norms
from phalanx.parameter_server.groups import Options
from phalanx.parameter_server.hosting import host
from phalanx.parameter_server.layout import State
from phalanx.parameter_server.shard import PushedGradients, Spec
from phalanx.rpc.functions import async_execution


@async_execution
def create(name: str, index: int, spec: Spec, state: State) -> Future[Any]:
    """Create the shard with the values of the first trainer."""
    place = host(name, index)
    return place.request(partial(place.create, spec, state))


def give_up(name: str, index: int) -> list[str]:
    """Wait no more for the trainers that have the optimizer before this one, and return who they are."""
    return host(name, index).give_up()


@async_execution
def attach(name: str, index: int, trainer: str, worker: int, described: str) -> Future[Any]:
    """Let another trainer, which is the worker of that uid, wait for the values of the first one."""
    place = host(name, index)
    return place.request(partial(place.attach, trainer, worker, described))


@async_execution
def push(name: str, index: int, trainer: str, clock: int, gradients: PushedGradients) -> Future[Any]:
    """Take all gradients that a trainer has for this server."""
    place = host(name, index)
    return place.request(partial(place.push, trainer, clock, gradients))


@async_execution
def leave(name: str, index: int, trainer: str) -> Future[Any]:
    """Count a trainer out that has done its work."""
    place = host(name, index)
    return place.request(partial(place.write, ("leave", trainer)))


@async_execution
def load(name: str, index: int, trainer: str, number: int, state: State | None) -> Future[Any]:
    """Go on from this state, or from that of the first trainer."""
    place = host(name, index)
    place.ask_load(trainer, number)
    return place.request(partial(place.load, trainer, number, state))


@async_execution
def pull(name: str, index: int, trainer: str, clock: int, dense: list[str], rows: Mapping[str, Tensor]) -> Future[Any]:
    """Return what a trainer needs from this server for its next step."""
    place = host(name, index)
    return place.request(partial(place.pull, trainer, clock, dense, rows))


@async_execution
def norms(name: str, index: int, trainer: str, clock: int) -> Future[dict[str, Norms]]:
    """Return the norms of the gradients that this server has for a step."""
    place = host(name, index)
    return place.request(partial(place.norms, trainer, clock))


@async_execution
def clip(name: str, index: int, clock: int, total: Tensor) -> Future[Any]:
    """Make a step, whose gradients have this norm on all servers together."""
    place = host(name, index)
    return place.request(partial(place.write, ("clip", clock, total)))


@async_execution
def add(name: str, index: int, *arguments: Any) -> Future[Any]:
    """Hold one more group of parameters."""
    place = host(name, index)
    return place.request(partial(place.add, *arguments))


@async_execution
def state(
    name: str, index: int, trainer: str, clock: int, said: Mapping[str, Sequence[Options]] | None = None
) -> Future[Any]:
    """Return all that this server has."""
    place = host(name, index)
    return place.request(partial(place.state, trainer, clock, said))


def clocks(name: str, index: int) -> dict[str, int]:
    """Return how far the trainers are."""
    return host(name, index).clocks()
