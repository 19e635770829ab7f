"""Detect whether this process has initialised CUDA: if it has, its forks cannot use CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

_DEVICES = "/dev/nvidia"


def find_cuda_use(modules: Mapping[str, Any], descriptors: Iterable[str]) -> str:
    """Return evidence that a process has initialised CUDA; "" if there is none.

    `modules` are its imported modules, and `descriptors` the paths of its open files. The driver opens its devices in
    cuInit, whichever library calls cuInit, and torch reports its own state. This check does not initialise CUDA.
    """
    torch = modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            return "torch.cuda.is_initialized()"
    except AttributeError:
        pass  # importing torch failed half way
    opened = sorted({path for path in descriptors if path.startswith(_DEVICES)})
    return f"open: {', '.join(opened)}" if opened else ""


def find_own_cuda_use() -> str:
    """Return the result of `find_cuda_use` for this process."""
    return find_cuda_use(sys.modules, _descriptors().values())


def close_devices() -> None:
    """Close the driver's devices before this process executes another program."""
    for fd, path in _descriptors().items():
        if path.startswith(_DEVICES):
            os.close(fd)


def describe(use: str, *, preloads: bool) -> str:
    """Return the message for the user that CUDA was initialised, with the evidence `use`.

    `preloads`: whether the zygote's import of torch, which --no-preload disables, has initialised CUDA.
    """
    suspects = _plugins()
    suspected = f" Suspects: {', '.join(suspects)}." if suspects else ""
    text = (
        f"phalanx run: CUDA was initialised ({use}) in the process that forks the ranks, "
        f"{'during the import of torch' if preloads else 'when Python started'}; the ranks can't use a GPU.{suspected}"
    )
    if preloads:
        return (
            f"{text} Each rank therefore imports torch itself, which takes longer. Initialise CUDA on first use, not "
            "in an import; or pass --no-preload, which does the same without this message."
        )
    return (
        f"{text} Check sitecustomize, usercustomize and .pth files. Ranks that use no GPU are not affected; for ranks "
        "that do, start the script without `phalanx run`, or initialise CUDA later."
    )


def _plugins() -> list[str]:
    """Return the packages, other than Phalanx, whose plugins run when torch is imported."""
    try:
        found = metadata.entry_points(group="torch.backends")
    except Exception:
        return []  # a broken package; the result is only a hint
    return [f"{one.name} ({one.value})" for one in found if not one.value.startswith("phalanx")]


def _descriptors() -> dict[int, str]:
    """Return the target of each descriptor of this process; empty if the system does not list them."""
    found = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for name in names:
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found
