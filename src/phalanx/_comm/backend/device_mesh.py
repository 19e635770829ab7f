"""`mesh` returns a `DeviceMesh`: the ranks of the job as a grid with named axes."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def mesh(device_type: str = "cpu", /, **axes: int) -> DeviceMesh:
    """Return a `DeviceMesh` of all ranks with these axes, such as `phalanx.mesh(pipeline=2, data=2)`. Collective.

    One axis may be -1; its size is then the number of ranks divided by the product of the other sizes. Neighbours on
    the last axis have consecutive ranks.

    Raises:
        ValueError: no axis was given, or the sizes do not multiply to the number of ranks.
        RuntimeError: there is no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError("phalanx.mesh needs a process group: call phalanx.init() first")
    world_size = dist.get_world_size()
    if not axes:
        raise ValueError("phalanx.mesh needs at least one axis, as in phalanx.mesh(pipeline=2, data=2)")
    sizes = dict(axes)
    open_axes = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(open_axes) == 1 and known > 0 and world_size % known == 0:
        sizes[open_axes[0]] = world_size // known
    if any(size < 1 for size in sizes.values()) or math.prod(sizes.values()) != world_size:
        grid = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(f"phalanx.mesh: {grid} does not match the number of ranks, {world_size}")
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
