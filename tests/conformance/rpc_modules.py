"""Modules that stand in the place of `torch.distributed.rpc` and its files: phalanx.rpc by PyTorch's names.

What the suite asks of PyTorch's inside (debug information, all-gather) is answered from the inside of ours.
"""

from __future__ import annotations

import gc
import types
import warnings
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed.rpc as torchs
import torch.distributed.rpc.internal as internal
from torch.autograd import profiler_legacy

import phalanx.optim
import phalanx.rpc
from phalanx._base.deadline import Deadline
from phalanx.rpc import current, invoke, options, serialization, start
from phalanx.rpc.agent.agent import Agent
from phalanx.rpc.autograd import graph, serve
from phalanx.rpc.autograd.contexts import Context

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates parts of itself that it imports
    import torch.distributed.optim as torchs_optim

_NAME = "torch.distributed.rpc"
NAMES = [_NAME, *(f"{_NAME}.{one}" for one in ("api", "constants", "functions", "internal", "options"))]
NAMES.append(f"{_NAME}.backend_registry")
_PROFILER = "torch.autograd.profiler_legacy"
AUTOGRAD, OPTIM = "torch.distributed.autograd", "torch.distributed.optim"
NAMES += [AUTOGRAD, OPTIM]


def build() -> dict[str, ModuleType]:
    """The modules, by PyTorch's names."""
    constants = _module("constants")
    constants.DEFAULT_RPC_TIMEOUT_SEC = options.DEFAULT_RPC_TIMEOUT_S
    constants.DEFAULT_INIT_METHOD = options.DEFAULT_INIT_METHOD
    constants.DEFAULT_SHUTDOWN_TIMEOUT = 0
    constants.DEFAULT_NUM_WORKER_THREADS = options.DEFAULT_NUM_WORKER_THREADS
    constants.UNSET_RPC_TIMEOUT = options.UNSET_RPC_TIMEOUT

    inside = _module("internal")
    for name in ("RPCExecMode", "PythonUDF", "_build_rpc_profiling_key"):
        setattr(inside, name, getattr(internal, name))
    inside._internal_rpc_pickler = _Pickler()
    inside.serialize = inside._internal_rpc_pickler.serialize
    inside.deserialize = inside._internal_rpc_pickler.deserialize

    api = _module("api")
    api._thread_local_var = _Futures()
    api._use_rpc_pickler = None
    api._default_pickler = inside._internal_rpc_pickler
    api._ignore_rref_leak = True
    api._wait_all = invoke.wait_all
    api._get_current_rpc_agent = _AgentView
    api._is_current_rpc_agent_set = current.is_set
    api._all_gather = _all_gather
    api._barrier = lambda names: _all_gather(None, set(names))
    api._wait_all_workers = lambda timeout=0.0: _all_gather(None, timeout=timeout or -1.0)
    api._delete_all_user_and_unforked_owner_rrefs = gc.collect
    api.shutdown = partial(_shutdown, api, api._wait_all_workers)
    api.get_worker_info = phalanx.rpc.get_worker_info
    api.rpc_sync, api.rpc_async, api.remote = phalanx.rpc.rpc_sync, phalanx.rpc.rpc_async, phalanx.rpc.remote
    api.RRef = phalanx.rpc.RRef

    registry = _module("backend_registry")
    registry.BackendType = phalanx.rpc.BackendType
    registry.construct_rpc_backend_options = lambda backend, **kwargs: phalanx.rpc.RpcBackendOptions(**kwargs)
    registry.register_backend = None

    found = _module("")
    for name in phalanx.rpc.__all__:
        setattr(found, name, getattr(phalanx.rpc, name))
    found.shutdown = api.shutdown
    found.PyRRef = phalanx.rpc.RRef
    found._rref_context_get_debug_info = _references
    found._get_debug_info = _debug_info
    found._set_rpc_timeout = _set_rpc_timeout
    found._get_current_rpc_agent = found.TensorPipeAgent = _AgentView
    found._is_current_rpc_agent_set = current.is_set
    found._delete_all_user_and_unforked_owner_rrefs = gc.collect
    found.enable_gil_profiling = lambda on: None
    found._UNSET_RPC_TIMEOUT = options.UNSET_RPC_TIMEOUT
    found._init_rpc_backend = _init_rpc_backend
    found._server_process_global_profile = torchs._server_process_global_profile
    found.api, found.constants, found.internal, found.backend_registry = api, constants, inside, registry
    functions = phalanx.rpc.functions
    parts = {"api": api, "constants": constants, "internal": inside, "backend_registry": registry}
    whole = {f"{_NAME}.{name}": module for name, module in parts.items()}
    whole[f"{_NAME}.options"] = options
    whole[f"{_NAME}.functions"] = functions
    found.options = options
    found.__path__ = []
    return {_NAME: found, **whole, AUTOGRAD: _autograd(), OPTIM: _optim(), _PROFILER: _profiler()}


def _profiler() -> Any:
    """PyTorch's old profiler, with ours in its place."""
    found: Any = types.ModuleType(_PROFILER)
    found.__dict__.update({name: one for name, one in vars(profiler_legacy).items() if not name.startswith("__")})
    found.profile = phalanx.rpc.profile
    return found


def _autograd() -> Any:
    """`torch.distributed.autograd`, with what the suite asks of its inside."""
    found: Any = types.ModuleType(AUTOGRAD)
    for name in phalanx.rpc.autograd.__all__:
        setattr(found, name, getattr(phalanx.rpc.autograd, name))
    found._current_context = _current_context
    found._retrieve_context = lambda context_id: serve.worker().contexts.find(context_id)
    found._new_context = lambda: serve.worker().contexts.open()
    found._release_context = lambda context_id: serve.worker().release(context_id)
    found._get_max_id = lambda: serve.worker().contexts.max_id
    found._is_valid_context = lambda context_id: serve.worker().contexts.find(context_id)
    found._get_debug_info = _autograd_debug_info
    graph._RECV.name = lambda node: "torch::distributed::autograd::RecvRpcBackward"
    return found


def _optim() -> Any:
    found: Any = types.ModuleType(OPTIM)
    found.__dict__.update({name: one for name, one in vars(torchs_optim).items() if not name.startswith("__")})
    found.__path__ = torchs_optim.__path__
    found.DistributedOptimizer = phalanx.optim.DistributedOptimizer
    return found


def _current_context() -> Context:
    found = serve.worker().contexts.current
    if found is None:
        raise RuntimeError("the current thread has no context")
    return found


def _autograd_debug_info() -> dict[str, str]:
    contexts = serve.worker().contexts.all()
    return {
        "num_current_backward_passes": str(sum(len(one.passes) for one in contexts)),
        "num_autograd_contexts": str(len(contexts)),
    }


def _module(name: str) -> Any:
    return types.ModuleType(f"{_NAME}.{name}" if name else _NAME)


def _shutdown(api: Any, own: Any, graceful: bool = True, timeout: float = 0.0) -> None:
    """A test that replaces PyTorch's way to wait for all workers has its own one called, as there."""
    if graceful and api._wait_all_workers is not own:
        try:
            api._wait_all_workers(timeout)
        except BaseException:
            phalanx.rpc.shutdown(graceful=False)
            raise
    phalanx.rpc.shutdown(graceful, timeout)


def _init_rpc_backend(
    backend: Any, store: Any, name: str, rank: int, world_size: int, rpc_backend_options: Any
) -> None:
    agent = start.start_agent(name, rank, world_size, store, rpc_backend_options, Deadline.after(60))
    current.set_agent(agent)
    agent.open_for_calls()


class _Pickler:
    """An object as bytes, and the tensors in it, by the pickler that calls go through."""

    def serialize(self, obj: Any) -> tuple[bytes, list[Any]]:
        payload = serialization.serialize(obj)
        return payload.data, [bytes(memoryview(one)) for one in payload.buffers]

    def deserialize(self, data: bytes, tensors: list[Any]) -> Any:
        return serialization.deserialize(data, [bytearray(one) for one in tensors])[0]


class _Futures:
    """`future_list` is there inside `_wait_all` alone."""

    @property
    def future_list(self) -> Any:
        futures = getattr(invoke._thread, "futures", None)
        if futures is None:
            raise AttributeError("future_list")
        return futures


class _AgentView:
    """What PyTorch's agent says of itself."""

    def __init__(self) -> None:
        self._agent: Agent = current.agent()

    def get_worker_infos(self) -> list[Any]:
        return [member.info for member in self._agent.membership.members()]

    def get_worker_info(self, name: str | None = None) -> Any:
        return phalanx.rpc.get_worker_info(name)

    def get_debug_info(self) -> dict[str, str]:
        agent = self._agent
        return {
            "agent.num_pending_requests": str(agent.functions.num_waiting),
            "agent.thread_pool_size": str(agent.options.num_worker_threads),
            "agent.num_idle_threads": str(agent.options.num_worker_threads - agent.call_limit.num_running),
            "agent.server_active_calls": str(agent.call_limit.num_running),
            "agent.server_active_async_calls": "0",
            "agent.client_active_calls": str(agent.num_in_flight),
        }

    def join(self, *args: Any, **kwargs: Any) -> None:
        self._agent.termination.wait_idle(Deadline.after(60))

    def get_timeout(self) -> float:
        return self._agent.default_timeout_s

    _get_backend_options = property(lambda self: lambda: self._agent.options)


def _references() -> dict[str, str]:
    gc.collect()
    agent = current.agent()
    counts = agent.references.count()
    pending = counts["num_pending_children"] + len(agent.references.dropped)
    return {
        "num_owner_rrefs": str(counts["num_owner_rrefs"]),
        "num_forks": str(counts["num_forks"]),
        "num_pending_users": str(pending),
        "num_pending_futures": str(agent.num_in_flight),
    }


def _debug_info() -> dict[str, str]:
    return {**_references(), **_AgentView().get_debug_info(), **_autograd_debug_info()}


def _set_rpc_timeout(timeout: float) -> None:
    current.agent().default_timeout_s = float(timeout)


def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = -1.0) -> dict[str, Any]:
    deadline = Deadline.after(timeout if timeout > 0 else None)
    return current.agent().termination.all_gather(obj, worker_names, deadline)
