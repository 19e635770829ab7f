"""Count the cores and GPUs that this job may use, without importing torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping


def find_cpus() -> tuple[int, ...]:
    """Return the cores on which this process may run; taskset, Slurm or a container may exclude some of the host's."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def share_cpus(cpus: tuple[int, ...], node: int, num_nodes: int) -> tuple[int, ...]:
    """Return the share of `cpus` that belongs to `node` of the `num_nodes` nodes on this host.

    Return all of `cpus` if the parent has already bound this process to its own cores, or there are too few cores.
    """
    if num_nodes == 1 or len(cpus) < num_nodes or _is_bound(cpus):
        return cpus
    return cpus[len(cpus) * node // num_nodes : len(cpus) * (node + 1) // num_nodes]


def _is_bound(cpus: tuple[int, ...]) -> bool:
    """Return whether this process may use fewer CPUs than its parent."""
    try:
        return set(cpus) < os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):
        return False


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of CUDA devices that torch would see: the driver's, limited by CUDA_VISIBLE_DEVICES."""
    return count_visible(_count_installed(), environ.get("CUDA_VISIBLE_DEVICES"))


def count_visible(installed: int, visible: str | None) -> int:
    """Return how many of `installed` devices CUDA_VISIBLE_DEVICES leaves.

    CUDA reads the list up to the first invalid entry, such as -1. Named devices (GPU-…, MIG-…) are assumed to exist.
    """
    if visible is None:
        return installed
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        known = name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < installed)
        if not known:
            break
        count += 1
    return count if installed else 0


def _count_installed() -> int:
    """Return the number of GPUs according to NVML, the driver's library; 0 without the library."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint(0)
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()
