"""Gather the facts of this host without changing anything.

Facts come from the operating system's files and settings. Features that shared memory needs (the C core, /proc, futex,
memfd, pidfd, Unix sockets, namespaces) are tried, because each may be missing on an old kernel, in a sandbox such as
gVisor, or behind a seccomp filter, and a version number does not show that.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import mmap
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import phalanx
from phalanx._base.control_groups import find_groups, read_cpu_quota, read_number
from phalanx._base.host_addresses import interface_addresses
from phalanx._comm.symmetric_memory.memfd import open_memfd
from phalanx._job.schedulers.find import find_allocation
from phalanx._job.schedulers.slurm import find_unused_hosts
from phalanx._tools.doctor.driver import query_driver
from phalanx._tools.doctor.facts import DoctorFacts, Kernel, MachineFacts, Probe
from phalanx._tools.doctor.trial import try_training
from phalanx.errors import LaunchError

_TIMEOUT_S = 10
# If a shell still sets these variables, programs assume that they are ranks of a job, or use the wrong network.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
_RESOLVE = "import socket; print(*sorted({entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}))"


def examine() -> DoctorFacts:
    """Return all facts that the checks need. Takes seconds, because another process imports PyTorch and trains."""
    torch, training = try_training()
    return DoctorFacts(phalanx.__version__, examine_host(), examine_kernel(), torch, training, query_driver())


def examine_host(root: Path = Path("/")) -> MachineFacts:
    """Return the facts of this host, from `/proc` and `/sys` below `root`. Takes seconds if name resolution is slow."""
    groups = find_groups(str(root))
    free, limited = _available_memory(root, groups)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, running = _processes(groups)
    return MachineFacts(
        platform=sys.platform,
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_quota=read_cpu_quota(groups),
        available_bytes=free,
        memory_limited=limited,
        commit_headroom_bytes=_commit_headroom(root),
        shm_bytes=shutil.disk_usage(root / "dev/shm").total if (root / "dev/shm").is_dir() else None,
        name=socket.gethostname(),
        name_resolves=_name_resolves(),
        open_files=_limit(soft),
        open_files_hard=_limit(hard),
        processes=processes,
        processes_running=running,
        clock_source=_read(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        scheduler=_scheduler(),
        addresses=_addresses(),
        unused_hosts=find_unused_hosts(os.environ),
        folder=_folder(),
    )


def _scheduler() -> Probe:
    try:
        found = find_allocation(os.environ)
    except LaunchError as error:
        return Probe(False, str(error).removeprefix("phalanx run: "))
    return Probe(True, found.describe() if found else "")


def _addresses() -> dict[str, tuple[str, ...]] | None:
    try:
        return interface_addresses()
    except OSError:  # no descriptor is left for the query
        return None


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _available_memory(root: Path, groups: list[str]) -> tuple[int | None, bool]:
    """Return the available bytes, and whether a control group limits them rather than the machine."""
    machine = _meminfo(root).get("MemAvailable")
    free = math.inf if machine is None else machine
    limited = False
    for group in groups:
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = read_number(group, limit_name), read_number(group, used_name)
            if limit is not None and used is not None:
                left = limit - used + _cache_bytes(group, cache_name)
                if left < free:
                    free, limited = left, True
    return (None, False) if free == math.inf else (max(0, int(free)), limited)


def _cache_bytes(group: str, name: str) -> int:
    """Return how many bytes of a control group's page cache the kernel can free on demand."""
    lines = (_read(Path(group, "memory.stat")) or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _commit_headroom(root: Path) -> int | None:
    """Return how many bytes may still be committed; None if the kernel overcommits."""
    if read_number(str(root), "proc/sys/vm/overcommit_memory") != 2:
        return None
    memory = _meminfo(root)
    return memory.get("CommitLimit", 0) - memory.get("Committed_AS", 0)


def _meminfo(root: Path) -> dict[str, int]:
    lines = (_read(root / "proc/meminfo") or "").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def _processes(groups: list[str]) -> tuple[int | None, int | None]:
    """Return the limit on processes and threads, and how many exist, in the tightest control group.

    Without such a group: RLIMIT_NPROC and None.
    """
    found = [(read_number(group, "pids.max"), read_number(group, "pids.current")) for group in groups]
    limits = [(limit, used or 0) for limit, used in found if limit is not None]
    if limits:
        return min(limits, key=lambda one: one[0] - one[1])
    return _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]), None


def _name_resolves() -> Probe:
    try:  # in a separate process: name resolution has no timeout otherwise
        run = subprocess.run(
            [sys.executable, "-I", "-c", _RESOLVE], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(False, f"no answer within {_TIMEOUT_S} s")
    except OSError as error:
        return Probe(False, f"no process could be started to resolve it: {error.strerror or error}")
    if run.returncode:
        return Probe(False, run.stderr.strip().rpartition("\n")[2])
    return Probe(True, run.stdout.strip())


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}
_FUTEX_WAKE = 1
# The initial namespaces have fixed inode numbers (include/linux/proc_ns.h), except the network namespace.
_FIRST_NAMESPACES = {"pid": "pid:[4026531836]", "user": "user:[4026531837]"}


def examine_kernel() -> Kernel:
    """Return a probe of each kernel feature that shared memory needs."""
    core = _try(_use_core)
    if sys.platform != "linux":
        return Kernel(core=core)
    return Kernel(
        core=core,
        proc=_try(_use_proc),
        futex=_try(_use_futex),
        memfd=_try(_use_memfd),
        pidfd=_try(_use_pidfd),
        unix_sockets=_try(_use_unix_sockets),
        namespaces=tuple(kind for kind, first in _FIRST_NAMESPACES.items() if _namespace(kind) not in ("", first)),
    )


def _try(use: Callable[[], str]) -> Probe:
    try:
        return Probe(True, use())
    except Exception as error:
        return Probe(False, f"{type(error).__name__}: {error}")


def _use_core() -> str:
    core = importlib.import_module("phalanx._core")
    return f"in {os.path.basename(core.__file__ or 'the interpreter')}"


def _use_futex() -> str:
    number = _FUTEX_NUMBER.get(platform.machine())
    if number is None:
        return f"not tried: its number on {platform.machine()} is not known here"
    word = ctypes.c_uint32(0)
    if ctypes.CDLL(None, use_errno=True).syscall(number, ctypes.byref(word), _FUTEX_WAKE, 1, None, None, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "answers"


def _use_proc() -> str:
    return f"{len(os.listdir('/proc/self/fd'))} open files"


def _use_memfd() -> str:
    """Write in one mapping and read in another that was opened through /proc, as a peer would."""
    descriptor = open_memfd("phalanx-doctor")
    try:
        os.truncate(descriptor, mmap.PAGESIZE)
        peer = os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR)
        try:
            with mmap.mmap(descriptor, mmap.PAGESIZE) as ours, mmap.mmap(peer, mmap.PAGESIZE) as theirs:
                ours[:4] = b"here"
                if theirs[:4] != b"here":
                    raise OSError("two mappings of one memfd do not show the same bytes")
        finally:
            os.close(peer)
    finally:
        os.close(descriptor)
    return "shared by two mappings"


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _use_unix_sockets() -> str:
    """Listen at an abstract address, as the first rank of a host does, and connect to it."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as connection:
        listener.bind(f"\0phalanx-doctor-{os.getpid()}")
        listener.listen()
        connection.connect(listener.getsockname())
    return "connect"


def _use_pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "opens"
