"""Find the ranks with the stages of a pipeline, and those with the same stages in other pipelines."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def find_groups(
    mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the ranks of this pipeline, and those with this rank's stages in others, if the mesh has replicas.

    Raises:
        ValueError: the mesh has other axes, or this rank is not in the group.
        RuntimeError: there is no process group.
    """
    if mesh is not None:
        if process_group is not None:
            raise ValueError("Pipeline takes process_group or mesh, not both")
        names = mesh.mesh_dim_names or ()
        if "pipeline" not in names or set(names) - {"pipeline", "data"}:
            raise ValueError(
                "Pipeline takes a mesh with the axes 'pipeline' and, if there are replicas, 'data', as in "
                f"phalanx.mesh(pipeline=2, data=2); got {', '.join(map(repr, names)) or 'none with names'}"
            )
        return mesh.get_group("pipeline"), mesh.get_group("data") if "data" in names else None
    if not dist.is_initialized():
        raise RuntimeError(
            "Pipeline needs a process group: call phalanx.init() or torch.distributed.init_process_group()"
        )
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("Pipeline: this rank is not in process_group; let only its ranks make the Pipeline")
    return group, None
