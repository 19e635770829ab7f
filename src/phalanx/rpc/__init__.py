"""Make remote procedure calls and keep remote references, with the API of `torch.distributed.rpc`.

init_rpc, shutdown, is_available,
get_worker_info, get_rpc_timeout               start.py
rpc_sync, rpc_async, remote                    invoke.py
RRef                                           rref.py, references.py
RemoteModule (of torch.distributed.nn)         remote_module.py
functions.async_execution                      functions.py
autograd.context, backward, get_gradients      autograd/
the agent: threads, calls, connections         agent/
"""

from phalanx.rpc import autograd as autograd
from phalanx.rpc import functions as functions
from phalanx.rpc.invoke import remote as remote
from phalanx.rpc.invoke import rpc_async as rpc_async
from phalanx.rpc.invoke import rpc_sync as rpc_sync
from phalanx.rpc.options import BackendType as BackendType
from phalanx.rpc.options import RpcBackendOptions as RpcBackendOptions
from phalanx.rpc.options import TensorPipeRpcBackendOptions as TensorPipeRpcBackendOptions
from phalanx.rpc.profiler import profile as profile
from phalanx.rpc.remote_error import RemoteError as RemoteError
from phalanx.rpc.remote_module import RemoteModule as RemoteModule
from phalanx.rpc.rref import RRef as RRef
from phalanx.rpc.start import get_rpc_timeout as get_rpc_timeout
from phalanx.rpc.start import get_worker_info as get_worker_info
from phalanx.rpc.start import init_rpc as init_rpc
from phalanx.rpc.start import is_available as is_available
from phalanx.rpc.start import shutdown as shutdown
from phalanx.rpc.worker_info import WorkerInfo as WorkerInfo

__all__ = [
    "BackendType",
    "RRef",
    "RemoteError",
    "RemoteModule",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "autograd",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "profile",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
