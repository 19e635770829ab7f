"""Look up a strategy by its name, or choose one for "auto"."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from phalanx._base.log import get_logger
from phalanx._comm import backend
from phalanx._comm.backend import rendezvous
from phalanx._comm.rendezvous.launchers import find_agents_store
from phalanx.strategies.devices import decide_devices
from phalanx.strategies.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy
from phalanx.strategies.periodic import DiLoCoStrategy, LocalSGDStrategy
from phalanx.strategies.pipelined import PipelineStrategy
from phalanx.strategies.servers import ParameterServerStrategy
from phalanx.strategies.sharded import ShardedStrategy
from phalanx.strategies.single_device import SingleDeviceStrategy
from phalanx.strategies.start import find_world, is_launched
from phalanx.strategies.strategy import Strategy

_logger = get_logger(__name__)

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    kind.name: kind
    for kind in (
        SingleDeviceStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        ShardedStrategy,
        PipelineStrategy,
        ParameterServerStrategy,
        LocalSGDStrategy,
        DiLoCoStrategy,
    )
}

# Strategy names of other frameworks; the error for such a name suggests ours.
_ELSEWHERE = {
    "dp": "'mirrored' (a process for each device)",
    "ddp": "'mirrored'",
    "ddp_spawn": "'mirrored'",
    "fsdp": "'sharded' with shard='model'",
    "fsdp2": "'sharded' with shard='model'",
    "zero": "'sharded'",
    "deepspeed": "'sharded'",
    "horovod": "'mirrored' or 'multi_worker_mirrored'",
    "one_device": "'single_device'",
    "ps": "'parameter_server'",
}


@dataclass(frozen=True)
class JobDescription:
    """A `JobDescription` is what "auto" decides from.

    `model_bytes` is the size of the parameters, `memory_bytes` that of a rank's memory; None if unknown. `may_grow` is
    True if hosts may join and leave: the choice must not depend on their number.
    """

    num_ranks: int
    num_local_ranks: int
    num_devices: int
    is_launched: bool
    model_bytes: int | None = None
    memory_bytes: int | None = None
    may_grow: bool = False


@dataclass(frozen=True)
class Choice:
    """A `Choice` is a strategy's name, its arguments, and the reason."""

    name: str
    options: dict[str, Any]
    reason: str


def decide_strategy(now: JobDescription) -> Choice:
    """Return the fastest strategy that fits into memory; a pure function.

    The estimate is four times the parameters' bytes: Adam keeps two moments, in addition to parameters and gradients.
    """
    ranks = now.num_ranks if now.is_launched else now.num_devices
    if ranks == 1 and not now.may_grow:
        return Choice("single_device", {}, "there is one device" if not now.is_launched else "one rank was launched")
    several = now.num_local_ranks < now.num_ranks or now.may_grow
    where = "one rank" if ranks == 1 else f"{ranks} ranks"
    if now.num_local_ranks < now.num_ranks:
        where += f", {now.num_local_ranks} of them on this host"
    elif now.may_grow:
        where += ", and others may join"
    else:
        where += " on one host"
    if now.model_bytes is not None and now.memory_bytes is not None:
        need, have = 4 * now.model_bytes, now.memory_bytes
        memory = f"training it takes {need / 1e9:.1f} GB, and a rank has {have / 1e9:.1f} GB"
        if 2 * now.model_bytes > have:
            return Choice("sharded", {"shard": "model"}, f"{where}; {memory}: parameters and gradients do not fit")
        if need > have:
            return Choice("sharded", {}, f"{where}; {memory}: all fits but the optimizer's state")
    return Choice("multi_worker_mirrored" if several else "mirrored", {}, f"{where}; a copy of the model fits each")


def _advise(name: str) -> str:
    """Suggest a valid name for `name`, if one can be guessed."""
    word = str(name).rpartition(".")[2]  # the name may be tf.distribute.MirroredStrategy, for example
    classes = {kind.__name__.lower(): repr(known) for known, kind in STRATEGIES.items() if isinstance(kind, type)}
    suggestion = _ELSEWHERE.get(word.lower()) or classes.get(word.lower()) or classes.get(f"{word.lower()}strategy")
    close = difflib.get_close_matches(word.lower(), ["auto", *STRATEGIES], n=1)
    if suggestion is None and close:
        suggestion = repr(close[0])
    return "" if suggestion is None else f"; you may mean {suggestion}"


def get(name: str = "auto", *, model: torch.nn.Module | None = None, **options: Any) -> Strategy:
    """Return the strategy called `name`; "auto" chooses one by ranks, hosts and devices, and sets its `reason`.

    Arguments:
        name: one of `phalanx.strategies.STRATEGIES`, or "auto".
        model: with "auto", the model that has to fit into memory.
        options: passed to the strategy.

    Raises:
        ValueError: there is no such strategy.
        TypeError: the strategy has no such option.
    """
    if name != "auto":
        if name not in STRATEGIES:
            raise ValueError(
                f"there is no strategy {name!r}{_advise(name)}: it is 'auto' or one of "
                f"{', '.join(map(repr, STRATEGIES))}"
            )
        return STRATEGIES[name](**options)
    launched = is_launched(os.environ)
    devices = decide_devices("strategies.get", None)
    may_grow = False
    if find_agents_store(os.environ):
        backend.init(timeout=options.get("timeout", 1800.0))  # the rendezvous tells whether other hosts may join
        may_grow = rendezvous.agents_key() is not None
    ranks, local = find_world(os.environ)
    bytes_of_model = None if model is None else sum(one.nbytes for one in model.parameters())
    memory_bytes = _memory(devices[0], local or len(devices))
    now = JobDescription(ranks, local, len(devices), launched, bytes_of_model, memory_bytes, may_grow)
    choice = decide_strategy(now)
    if choice.name == "single_device":
        options.pop("timeout", None)  # a single device has no process group, and takes no timeout
    strategy = STRATEGIES[choice.name](**choice.options, **options)
    strategy.reason = choice.reason
    if strategy.is_main:
        _logger.info("phalanx.strategies: auto chooses %s: %s", type(strategy).__name__, choice.reason)
    return strategy


def _memory(device: torch.device, ranks: int) -> int | None:
    """Return the bytes that a rank may use: its GPU's memory, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    except (ValueError, OSError):
        return None
