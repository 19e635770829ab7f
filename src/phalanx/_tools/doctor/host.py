"""Gather the facts of this host: read the operating system's files and settings, and change nothing."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import phalanx
from phalanx._base.control_groups import find_groups, read_cpu_quota, read_number
from phalanx._base.host_addresses import interface_addresses
from phalanx._job.schedulers.find import find_allocation
from phalanx._job.schedulers.slurm import find_unused_hosts
from phalanx._tools.doctor.driver import query_driver
from phalanx._tools.doctor.facts import DoctorFacts, MachineFacts, Probe
from phalanx._tools.doctor.kernel import examine_kernel
from phalanx._tools.doctor.trial import try_training
from phalanx.errors import LaunchError

_TIMEOUT_S = 10
# If a shell still has these variables, programs assume that they are ranks of a job, or connect to wrong addresses.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
_RESOLVE = "import socket; print(*sorted({entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}))"


def examine() -> DoctorFacts:
    """Return all facts that the checks need. This imports PyTorch in another process, which takes seconds."""
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
    """Return the bytes that the kernel uses to cache files for a control group, and frees on demand."""
    lines = (_read(Path(group, "memory.stat")) or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _commit_headroom(root: Path) -> int | None:
    """Return the bytes that may still be committed, if the kernel does not overcommit; else None."""
    if read_number(str(root), "proc/sys/vm/overcommit_memory") != 2:
        return None
    memory = _meminfo(root)
    return memory.get("CommitLimit", 0) - memory.get("Committed_AS", 0)


def _meminfo(root: Path) -> dict[str, int]:
    lines = (_read(root / "proc/meminfo") or "").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def _processes(groups: list[str]) -> tuple[int | None, int | None]:
    """Return the limit on processes and threads, and their number: of the tightest control group, else RLIMIT_NPROC."""
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
