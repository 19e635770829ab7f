"""Read the limits of this process's control groups (cgroup v1 and v2)."""

from __future__ import annotations

import os
from collections.abc import Iterable


def find_groups(root: str = "/") -> list[str]:
    """Return the folders of the control groups that limit this process, its own first, then the parents."""
    mount = os.path.join(root, "sys/fs/cgroup")
    groups: list[str] = []
    for line in (_read(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 is mounted alone, or beside version 1, which has a folder, or a link, for each controller.
        names = ["", "unified"] if not controllers else [controllers, *controllers.split(",")]
        for base in dict.fromkeys(os.path.join(mount, name) if name else mount for name in names):
            # In a container the path is often the host's, and the group itself is mounted at the base.
            parts = [part for part in path.split("/") if part not in ("", "..")]
            own = [os.path.join(base, *parts[:depth]) for depth in range(len(parts), -1, -1)]
            groups += [group for group in own if group not in groups and os.path.isdir(group)]
    return groups


def read_cpu_quota(groups: Iterable[str]) -> float | None:
    """Return the smallest CPU quota of `groups`, in cores; None without a limit."""
    quotas = []
    for group in groups:
        if words := (_read(os.path.join(group, "cpu.max")) or "").split():  # version 2: "max 100000", "150000 100000"
            quotas += [int(words[0]) / int(words[1])] if words[0] != "max" else []
        quota, period = read_number(group, "cpu.cfs_quota_us"), read_number(group, "cpu.cfs_period_us")
        if quota and period and quota > 0:  # in version 1, -1 means no limit
            quotas.append(quota / period)
    return min(quotas, default=None)


def count_cores(cores: int) -> int:
    """Return how many ranks or threads run at full speed on `cores` cores under the CPU quota; at least one."""
    quota = read_cpu_quota(find_groups())
    return cores if quota is None else max(1, min(cores, int(quota)))


def read_number(group: str, name: str) -> int | None:
    """Return the number in the file `name` of `group`; None if there is no such file, or no number in it."""
    text = _read(os.path.join(group, name))
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None
