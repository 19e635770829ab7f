"""A program that knows nothing of Phalanx: what it can see of `torch.distributed`, told as JSON. See test_installed."""

import datetime
import json
import os
import signal
import sys
import threading

variables = dict(os.environ)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.rpc as rpc  # noqa: E402

c10d = sys.modules["torch.distributed.distributed_c10d"]
rendezvous = sys.modules["torch.distributed.rendezvous"]
ANSWER, DEAF, FREE, RPC = sys.argv[1:5]  # a file, and ports: at one nobody listens, one is free, and one is for RPC
SECOND = datetime.timedelta(seconds=1)
seen = {}


def kind(value):
    """Whose a function is, and which: a wrapper may carry the name, and even the module, of what it wraps."""
    code = getattr(value, "__code__", None)
    return [getattr(value, "__module__", ""), getattr(value, "__qualname__", ""), code and code.co_filename]


def said(what, call):
    """What `call` answers or raises."""
    try:
        seen[what] = repr(call())
    except Exception as error:
        seen[what] = f"{type(error).__name__}: {error}".replace(DEAF, "DEAF").replace(FREE, "FREE").splitlines()[0]


seen["modules"] = sorted(sys.modules)
seen["threads"] = [[t.name, t.daemon] for t in threading.enumerate()]
seen["tasks"] = len(os.listdir("/proc/self/task"))
seen["descriptors"] = len(os.listdir("/proc/self/fd"))
seen["variables"] = {k: v for k, v in os.environ.items() if variables.get(k) != v}
seen["signals"] = {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()}
seen["hooks"] = [kind(sys.excepthook), kind(sys.unraisablehook), kind(threading.excepthook)]
flags = [name for name in dir(dist) if name.startswith("is_") and name.endswith("_available") and "backend" not in name]
seen["available"] = {name: getattr(dist, name)() for name in flags}
for name in ("backend_list", "backend_capability", "backend_type_map", "default_device_backend_map", "_plugins"):
    value = getattr(dist.Backend, name)
    seen[name] = {k: str(v) for k, v in value.items()} if isinstance(value, dict) else list(value)
seen["names"] = sorted(dir(dist.Backend))
seen["mpi"] = [dist.Backend.MPI, getattr(dist.Backend, "MPI"), dist.is_backend_available("mpi")]  # noqa: B009
seen["functions"] = {
    f"{module.__name__}.{name}": kind(value)
    for module in (dist, c10d, rendezvous, rpc, torch.distributed.device_mesh)
    for name, value in vars(module).items()
    if callable(value)
}
seen["handlers"] = {scheme: kind(handler) for scheme, handler in rendezvous._rendezvous_handlers.items()}


def start(backend, **more):
    """Start a group of two, of which this process is alone."""
    dist.init_process_group(backend, timeout=SECOND, **more)


said("nobody launched", lambda: dist.init_process_group("gloo"))
said("nobody launched, and no name", lambda: dist.init_process_group())
said("under mpiexec", lambda: os.environ.update(PMI_RANK="0", PMI_SIZE="1") or dist.init_process_group("gloo"))
said("nobody there", lambda: start("gloo", init_method=f"tcp://127.0.0.1:{DEAF}", rank=1, world_size=2))
said("alone", lambda: start("gloo", init_method=f"tcp://127.0.0.1:{FREE}", rank=0, world_size=2))
os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=DEAF)
said("nobody there, by variables", lambda: start("gloo"))
said("no port", lambda: start("gloo", init_method="tcp://127.0.0.1", rank=1, world_size=2))
said("unknown", lambda: start("nonsense", store=dist.HashStore(), rank=0, world_size=1))

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT=RPC)
for backend in (None, "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    said(f"{backend}: name", group.name)
    said(f"{backend}: backend", dist.get_backend)
    said(f"{backend}: config", dist.get_backend_config)
    said(f"{backend}: type", lambda group=group: type(group._get_backend(torch.device("cpu"))).__name__)
    said(f"{backend}: sequence", group._get_sequence_number_for_group)
    said(f"{backend}: hooks", group._has_hooks)
    said(f"{backend}: barrier", dist.barrier)
    said(f"{backend}: monitored barrier", dist.monitored_barrier)
    said(f"{backend}: a group of ucc", lambda: dist.new_group([0], backend="ucc"))
    dist.destroy_process_group()

rpc.init_rpc("alone", rank=0, world_size=1)
said("rpc", lambda: rpc.rpc_sync("alone", max, args=(1, 2)))
rpc.shutdown()
seen["modules in the end"] = sorted(sys.modules)
with open(ANSWER, "w") as file:
    json.dump(seen, file)
