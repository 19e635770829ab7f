"""`RpcBackendOptions` are the options of `init_rpc`, under PyTorch's names."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

DEFAULT_RPC_TIMEOUT_S = 60.0
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_INIT_METHOD = "env://"
UNSET_RPC_TIMEOUT = -1.0
MOST_CALLS = 10_000
MOST_BYTES = 4 << 30


def seconds_of(timeout: float, default_s: float) -> float:
    """Return the timeout of a call in seconds; 0 is no timeout, as for a `timeout` too large for the clock.

    A negative `timeout` selects `default_s`.

    Raises:
        TypeError: `timeout` has the wrong type.
        ValueError: `timeout` is NaN.
    """
    if type(timeout) is not float and not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is a number of seconds (0: never), got a {type(timeout).__name__}")
    if timeout < 0:
        return default_s
    if timeout < threading.TIMEOUT_MAX:
        return timeout
    if math.isnan(timeout):
        raise ValueError("timeout is a number of seconds (0: never), got nan")
    return 0.0


class BackendType(enum.Enum):
    """A `BackendType` is PyTorch's choice of a transport; all members select the same one."""

    TENSORPIPE = "TENSORPIPE"
    PHALANX = "PHALANX"


class RpcBackendOptions:
    """`RpcBackendOptions` are the options of a worker.

    Arguments:
        num_worker_threads: the maximum number of incoming calls that run at the same time.
        rpc_timeout: seconds after which a call without a timeout of its own fails; 0 for never.
        init_method: where the workers find each other, as for `init_process_group`.
        device_maps, devices: checked, but not used: tensors on GPUs are copied through the pickle.
        max_calls_in_flight, max_bytes_in_flight: limits for the calls to any one worker; further calls wait.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_S,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
        devices: Sequence[Any] | None = None,
        max_calls_in_flight: int = MOST_CALLS,
        max_bytes_in_flight: int = MOST_BYTES,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        if num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be at least 1, got {num_worker_threads}")
        if max_calls_in_flight < 1 or max_bytes_in_flight < 1:
            raise ValueError("max_calls_in_flight and max_bytes_in_flight must be at least 1")
        if not isinstance(rpc_timeout, (int, float)):
            raise TypeError(
                "RpcBackendOptions: incompatible constructor arguments: rpc_timeout is a number of seconds, got a "
                f"{type(rpc_timeout).__name__}"
            )
        if not (rpc_timeout >= 0 or rpc_timeout == UNSET_RPC_TIMEOUT) or math.isnan(rpc_timeout):
            raise ValueError(f"rpc_timeout must be a number of seconds, 0 (never) or more, got {rpc_timeout}")
        self.num_worker_threads = num_worker_threads
        self.rpc_timeout = float(seconds_of(rpc_timeout, DEFAULT_RPC_TIMEOUT_S))
        self.init_method = init_method
        self.device_maps = {to: _device_map(one) for to, one in (device_maps or {}).items()}
        self.devices = [torch.device(one) for one in devices or ()]
        self.max_calls_in_flight = max_calls_in_flight
        self.max_bytes_in_flight = max_bytes_in_flight

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Add to the device map for the worker `to`."""
        new, old = _device_map(device_map), self.device_maps.get(to, {})
        for source, target in new.items():
            if old.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and "
                    f"{old[source]}"
                )
        self.device_maps[to] = {**old, **new}

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Set the devices of this worker."""
        self.devices = [torch.device(one) for one in devices]


TensorPipeRpcBackendOptions = RpcBackendOptions


def _device_map(given: Mapping[Any, Any]) -> dict[torch.device, torch.device]:
    made: dict[torch.device, torch.device] = {}
    for source, target in given.items():
        one, other = torch.device(source), torch.device(target)
        if other in made.values():
            raise ValueError(f"`device_map` only supports 1-to-1 mapping, trying to map {one} and another to {other}")
        made[one] = other
    return made
